// openai for Node: chats, streams, history, tools, structured outputs, responses, prompt batches, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "acme/upper", text = "Weft serves 6 adapters on 1 model", answer = text.toUpperCase();
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused" });
const asked = { model, messages: [{ role: "user", content: text }], temperature: 0 };
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), days: z.number().int().min(1).max(9) });
const parameters = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

const names = [];
for await (const one of client.models.list()) names.push(one.id);
assert(names.includes(model));
const whole = await client.chat.completions.create(asked);
assert.equal(whole.choices[0].message.content, answer);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  streamed += chunk.choices[0]?.delta.content ?? "";
assert.equal(streamed, answer);
assert.equal(await client.chat.completions.stream(asked).finalContent(), answer);
const history = [...asked.messages, whole.choices[0].message, { role: "user", content: text }];
assert.equal((await client.chat.completions.create({ ...asked, messages: history })).choices[0].message.content, answer);

let seen;
const weather = { name: "weather", parameters, parse: JSON.parse, function: (given) => ((seen = given), "sunny") };
const runner = client.chat.completions.runTools({
  ...asked, tools: [{ type: "function", function: weather }], tool_choice: { type: "function", function: { name: "weather" } },
});
await runner.done();
assert(Weather.safeParse(seen).success);
const parsed = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Weather, "weather") });
assert(Weather.safeParse(parsed.choices[0].message.parsed).success);
assert.equal((await client.responses.create({ model, input: text, temperature: 0 })).output_text, answer);
const batch = await client.completions.create({ model, prompt: [text, "weft"], temperature: 0, max_tokens: 100 });
assert.deepEqual(batch.choices.map((one) => one.text), [answer, "WEFT"]);
await assert.rejects(client.chat.completions.create({ ...asked, model: "acme/nothing" }), OpenAI.NotFoundError);
