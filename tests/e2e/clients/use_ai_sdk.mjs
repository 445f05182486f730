// Vercel AI SDK: the OpenAI provider (responses by default, chats) and the OpenAI-compatible one.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const model = "acme/upper", text = "Weft serves 6 adapters on 1 model", answer = text.toUpperCase();
const baseURL = process.argv[2], apiKey = "unused";
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), days: z.number().int().min(1).max(9) });
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ baseURL, apiKey, name: "weft", supportsStructuredOutputs: true });

for (const one of [openai(model), openai.chat(model), compatible(model)]) {
  const asked = { model: one, temperature: 0 };
  const first = await generateText({ ...asked, prompt: text });
  assert.equal(first.text, answer);
  assert.equal(await streamText({ ...asked, prompt: text }).text, answer);
  const messages = [{ role: "user", content: text }, ...first.response.messages, { role: "user", content: text }];
  assert.equal((await generateText({ ...asked, messages })).text, answer);
  const weather = tool({ inputSchema: Weather, execute: async () => "sunny" });
  const called = await generateText({ ...asked, prompt: text, tools: { weather }, toolChoice: "required" });
  assert(Weather.safeParse(called.toolCalls[0].input).success);
  assert.equal(called.toolResults[0].output, "sunny");
  const formed = await generateObject({ ...asked, prompt: text, schema: Weather });
  assert(Weather.safeParse(formed.object).success);
}
// it writes a prompt as "user:", text, "assistant:"
const completed = await generateText({ model: openai.completion(model), prompt: text, temperature: 0, maxOutputTokens: 100 });
assert(completed.text.includes(answer));
