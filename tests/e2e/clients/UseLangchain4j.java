// langchain4j on the JDK's HttpClient: chats, streams, history, tools, structured outputs, completions, errors.
import dev.langchain4j.agent.tool.ToolSpecification;
import dev.langchain4j.data.message.UserMessage;
import dev.langchain4j.exception.ModelNotFoundException;
import dev.langchain4j.model.chat.request.ChatRequest;
import dev.langchain4j.model.chat.request.ResponseFormat;
import dev.langchain4j.model.chat.request.ResponseFormatType;
import dev.langchain4j.model.chat.request.ToolChoice;
import dev.langchain4j.model.chat.request.json.JsonObjectSchema;
import dev.langchain4j.model.chat.request.json.JsonSchema;
import dev.langchain4j.model.chat.response.ChatResponse;
import dev.langchain4j.model.chat.response.StreamingChatResponseHandler;
import dev.langchain4j.model.openai.OpenAiChatModel;
import dev.langchain4j.model.openai.OpenAiLanguageModel;
import dev.langchain4j.model.openai.OpenAiStreamingChatModel;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.stream.IntStream;

public class UseLangchain4j {
    public static void main(String[] args) throws Exception {
        String model = "acme/upper", text = "Weft serves 6 adapters on 1 model", answer = text.toUpperCase();
        var chat = OpenAiChatModel.builder().baseUrl(args[0]).apiKey("unused").modelName(model).temperature(0.0).build();
        same(answer, chat.chat(text));
        var first = UserMessage.from(text);
        var said = chat.chat(first).aiMessage();
        same(answer, chat.chat(first, said, first).aiMessage().text());
        IntStream.range(0, 16).parallel().forEach(i -> same(answer, chat.chat(text)));

        var whole = new CompletableFuture<ChatResponse>();
        var streamed = new StringBuilder();
        var stream = OpenAiStreamingChatModel.builder().baseUrl(args[0]).apiKey("unused").modelName(model).temperature(0.0).build();
        stream.chat(text, new StreamingChatResponseHandler() {
            public void onPartialResponse(String part) { streamed.append(part); }
            public void onCompleteResponse(ChatResponse response) { whole.complete(response); }
            public void onError(Throwable error) { whole.completeExceptionally(error); }
        });
        same(answer, whole.get().aiMessage().text());
        same(answer, streamed.toString());

        var city = JsonObjectSchema.builder().addEnumProperty("city", List.of("Rome", "Oslo")).required("city").build();
        var weather = ToolSpecification.builder().name("weather").parameters(city).build();
        var called = chat.chat(ChatRequest.builder().messages(first).toolSpecifications(weather)
            .toolChoice(ToolChoice.REQUIRED).build()).aiMessage().toolExecutionRequests();
        same("weather", called.get(0).name());
        var format = ResponseFormat.builder().type(ResponseFormatType.JSON)
            .jsonSchema(JsonSchema.builder().name("city").rootElement(city).build()).build();
        var formed = chat.chat(ChatRequest.builder().messages(first).responseFormat(format).build()).aiMessage().text();
        if (!formed.replaceAll("\\s", "").matches("\\{\"city\":\"(Rome|Oslo)\".*")) throw new AssertionError(formed);

        var completions = OpenAiLanguageModel.builder().baseUrl(args[0]).apiKey("unused").modelName(model).temperature(0.0).build();
        same(answer.substring(0, 9), completions.generate(text).content().substring(0, 9)); // of 16 tokens
        try {
            OpenAiChatModel.builder().baseUrl(args[0]).apiKey("unused").modelName("acme/nothing").build().chat(text);
            throw new AssertionError("a model that is not there answered");
        } catch (ModelNotFoundException expected) {
            // as OpenAI's 404
        }
        System.exit(0);
    }

    private static void same(String wanted, String given) {
        if (!wanted.equals(given)) throw new AssertionError("expected " + wanted + ", got " + given);
    }
}
