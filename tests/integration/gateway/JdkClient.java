import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.concurrent.CompletableFuture;

/** Sends each line of a file, `METHOD PATH BODY`, with the JDK's defaults, and prints the status and body of each answer. */
public class JdkClient {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        var together = new ArrayList<CompletableFuture<HttpResponse<String>>>();
        for (String line : Files.readAllLines(Path.of(args[1]))) {
            String[] words = line.split(" ", 3);
            for (String way : words[0].equals("GET") ? new String[] {""} : new String[] {"", "chunked", "expect"}) {
                var body = way.equals("chunked")
                    ? BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(words[2].getBytes()))
                    : words[0].equals("GET") ? BodyPublishers.noBody() : BodyPublishers.ofString(words[2]);
                HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + words[1]))
                    .header("content-type", "application/json").expectContinue(way.equals("expect"))
                    .method(words[0], body).build();
                print(client.send(request, BodyHandlers.ofString()));
                together.add(client.sendAsync(request, BodyHandlers.ofString()));
            }
        }
        for (var answer : together) print(answer.get());
    }

    private static void print(HttpResponse<String> answer) {
        System.out.println(answer.statusCode() + " " + answer.body().replaceAll("\\s+", " "));
    }
}
