"""Names that others know, read from wheels; nothing is imported: request fields, and vLLM's metrics.

`python -m harness.client_fields` (`make client-fields`) downloads the newest wheels (vLLM's has 340 MB) and writes
`client_fields.json` again: versions, of each path the names of request fields by package, and of each metric of vLLM
its type and labels, as far as its sources say them in place. A folder of wheels may be given instead. Fields of an
object inside a request have its place before their names, as in `weft_gateway.hints`.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

RECORD = Path(__file__).with_name("client_fields.json")
PACKAGES = ("anthropic", "openai", "vllm")
OPENAI, CLAUDE, VLLM = "openai.types", "anthropic.types", "vllm.entrypoints"
POOLED = f"{VLLM}.pooling"
CHAT, RESPONSE, BETA = f"{OPENAI}.chat", f"{OPENAI}.responses", f"{CLAUDE}.beta"
SCORES = ("Data", "QueriesDocuments", "QueriesItems", "Text")
CLASSES: Mapping[str, Sequence[str]] = {  # by path: MODULE:CLASS, of objects inside MODULE:CLASS:PLACE
    "/v1/chat/completions": (
        f"{OPENAI}.chat.completion_create_params:CompletionCreateParamsStreaming",
        f"{VLLM}.openai.chat_completion.protocol:ChatCompletionRequest",
        f"{CHAT}.chat_completion_stream_options_param:ChatCompletionStreamOptionsParam:stream_options",
        f"{VLLM}.generate.base.protocol:StreamOptions:stream_options",
        f"{CHAT}.chat_completion_function_tool_param:ChatCompletionFunctionToolParam:tools[]",
        f"{OPENAI}.shared_params.function_definition:FunctionDefinition:tools[].function",
        f"{CHAT}.chat_completion_content_part_text_param:ChatCompletionContentPartTextParam:messages[].content[]",
    ),
    "/v1/chat/completions/batch": (f"{VLLM}.openai.chat_completion.protocol:BatchChatCompletionRequest",),
    "/v1/completions": (
        f"{OPENAI}.completion_create_params:CompletionCreateParamsStreaming",
        f"{VLLM}.openai.completion.protocol:CompletionRequest",
    ),
    "/v1/responses": (
        f"{OPENAI}.responses.response_create_params:ResponseCreateParamsStreaming",
        f"{VLLM}.openai.responses.protocol:ResponsesRequest",
        f"{RESPONSE}.function_tool_param:FunctionToolParam:tools[]",
        f"{RESPONSE}.response_text_config_param:ResponseTextConfigParam:text",
        f"{OPENAI}.shared_params.reasoning:Reasoning:reasoning",
        f"{RESPONSE}.response_input_text_param:ResponseInputTextParam:input[].content[]",
    ),
    "/v1/responses/input_tokens": (f"{OPENAI}.responses.input_token_count_params:InputTokenCountParams",),
    "/v1/messages": (
        f"{CLAUDE}.message_create_params:MessageCreateParamsStreaming",
        f"{CLAUDE}.beta.message_create_params:MessageCreateParamsStreaming",
        f"{VLLM}.anthropic.protocol:AnthropicMessagesRequest",
        f"{BETA}.beta_text_block_param:BetaTextBlockParam:system[]",
        f"{BETA}.beta_text_block_param:BetaTextBlockParam:messages[].content[]",
        f"{BETA}.beta_tool_param:BetaToolParam:tools[]",
        f"{VLLM}.anthropic.protocol:AnthropicTool:tools[]",
        f"{BETA}.beta_tool_choice_auto_param:BetaToolChoiceAutoParam:tool_choice",
        f"{BETA}.beta_thinking_config_enabled_param:BetaThinkingConfigEnabledParam:thinking",
        f"{BETA}.beta_thinking_config_adaptive_param:BetaThinkingConfigAdaptiveParam:thinking",
        f"{BETA}.beta_output_config_param:BetaOutputConfigParam:output_config",
        f"{BETA}.beta_metadata_param:BetaMetadataParam:metadata",
    ),
    "/v1/messages/count_tokens": (
        f"{CLAUDE}.message_count_tokens_params:MessageCountTokensParams",
        f"{CLAUDE}.beta.message_count_tokens_params:MessageCountTokensParams",
        f"{VLLM}.anthropic.protocol:AnthropicCountTokensRequest",
    ),
    "/v1/embeddings": (
        f"{OPENAI}.embedding_create_params:EmbeddingCreateParams",
        f"{POOLED}.embed.protocol:EmbeddingCompletionRequest",
        f"{POOLED}.embed.protocol:EmbeddingChatRequest",
    ),
    "/pooling": (
        f"{POOLED}.pooling.protocol:PoolingCompletionRequest",
        f"{POOLED}.pooling.protocol:PoolingChatRequest",
        f"{POOLED}.pooling.protocol:IOProcessorRequest",
    ),
    "/score": tuple(f"{POOLED}.scoring.protocol:Score{form}Request" for form in SCORES),
    "/rerank": (f"{POOLED}.scoring.protocol:RerankRequest",),
    "/tokenize": (
        f"{VLLM}.serve.tokenize.protocol:TokenizeCompletionRequest",
        f"{VLLM}.serve.tokenize.protocol:TokenizeChatRequest",
    ),
    "/detokenize": (f"{VLLM}.serve.tokenize.protocol:DetokenizeRequest",),
    "/v1/load_lora_adapter": (f"{VLLM}.serve.lora.protocol:LoadLoRAAdapterRequest",),
    "/v1/unload_lora_adapter": (f"{VLLM}.serve.lora.protocol:UnloadLoRAAdapterRequest",),
    "/v1/files": (f"{OPENAI}.file_create_params:FileCreateParams",),
    "/v1/batches": (f"{OPENAI}.batch_create_params:BatchCreateParams",),
}


METRICS = ("vllm.v1.metrics.loggers", "vllm.v1.spec_decode.metrics")
EACH_ENGINE = ["model_name", "engine"]  # `labelnames` in these modules


class Wheel:
    """The sources of a package."""

    def __init__(self, path: Path) -> None:
        self.version = path.name.split("-")[1]
        self._archive = zipfile.ZipFile(path)
        self._files = set(self._archive.namelist())

    def fields(self, module: str, name: str) -> set[str]:
        """Return the fields of a class and of its bases inside the package. Raises LookupError."""
        for statement in ast.parse(self._archive.read(self._file(module))).body:
            match statement:
                case ast.ClassDef() if statement.name == name:
                    bases = [base.value if isinstance(base, ast.Subscript) else base for base in statement.bases]
                    inherited = [self.fields(module, base.id) for base in bases if isinstance(base, ast.Name)]
                    return _declared(statement).union(*inherited)
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(args=[_, ast.Dict(keys=keys)])) if (
                    target == name
                ):
                    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
                case ast.ImportFrom(names=[*names]) if any(alias.name == name for alias in names):
                    origin = self._origin(module, statement)
                    is_inside = origin.partition(".")[0] == module.partition(".")[0]
                    return self.fields(origin, name) if is_inside else set()
                case _:
                    pass
        raise LookupError(f"{module} has no {name}")

    def metrics(self, module: str) -> dict[str, str]:
        """Return the metrics that a module names, with type and labels; nothing where they are not in place."""
        nodes = list(ast.walk(ast.parse(self._archive.read(self._file(module)))))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found = {text: "" for text in texts if re.fullmatch(r"vllm:\w+", text)}
        constants = {
            target.attr: node.value.value
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Attribute)
        }
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(attr=made), keywords=keywords):
                    given = {keyword.arg: keyword.value for keyword in keywords}
                    match given:
                        case {"name": ast.Constant(value=str(name)), "labelnames": labels} if name in found:
                            with suppress(LookupError):
                                kind = made.strip("_").removesuffix("_cls")
                                found[name] = " ".join([kind, *_labels(labels, constants)])
                        case _:
                            pass
                case _:
                    pass
        return found

    def _file(self, module: str) -> str:
        path = module.replace(".", "/")
        return f"{path}.py" if f"{path}.py" in self._files else f"{path}/__init__.py"

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the name of the module that a statement of a module imports from."""
        levels = statement.level - self._file(module).endswith("/__init__.py")
        around = module.split(".")[:-levels] if levels else module.split(".")
        return ".".join(filter(None, [*(around if statement.level else ()), statement.module]))


def _labels(node: ast.expr, constants: Mapping[str, object]) -> list[str]:
    """Return the labels that an expression gives. Raises LookupError."""
    match node:
        case ast.Name(id="labelnames"):
            return EACH_ENGINE
        case ast.BinOp(left=left, right=right):
            return [*_labels(left, constants), *_labels(right, constants)]
        case ast.List(elts=elements):
            return [
                str(
                    element.value
                    if isinstance(element, ast.Constant)
                    else constants[ast.unparse(element)[len("self.") :]]
                )
                for element in elements
            ]
        case _:
            raise LookupError(f"labels that are not written in place: {ast.unparse(node)}")


def _declared(statement: ast.ClassDef) -> set[str]:
    """Return the annotated names of a class, without class variables and private names."""
    return {
        item.target.id
        for item in statement.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
        if not ast.unparse(item.annotation).startswith("ClassVar")
    }


def _record(folder: Path) -> dict[str, dict[str, object]]:
    """Read the wheels of a folder, one of each package."""
    wheels = {package: Wheel(next(folder.glob(f"{package}-*.whl"))) for package in PACKAGES}
    fields = dict[str, object]()
    for path, classes in CLASSES.items():
        names = dict[str, set[str]]()
        for place in classes:
            module, name, *inside = place.split(":")
            package = module.partition(".")[0]
            declared = wheels[package].fields(module, name)
            names.setdefault(package, set()).update(".".join([*inside, field]) for field in declared)
        fields[path] = {package: " ".join(sorted(listed)) for package, listed in names.items()}
    metrics = {name: about for module in METRICS for name, about in sorted(wheels["vllm"].metrics(module).items())}
    versions = {package: wheel.version for package, wheel in wheels.items()}
    return {"versions": versions, "fields": fields, "metrics": metrics}


def write(folder: Path) -> None:
    """Write the record of the wheels of a folder."""
    RECORD.write_text(json.dumps(_record(folder), indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        write(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*command, "--dest", folder, *PACKAGES], check=True)
            write(Path(folder))
