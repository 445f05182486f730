# pyright: reportUnusedImport=false
"""The OpenAI API: which requests are accepted, and the shape of answers.

Tests take these names from here: the modules behind them may change.
"""

from weft_gateway.openai.answer import PING_S, IdleWatch
from weft_gateway.openai.batches import BatchRequest
from weft_gateway.openai.call import Call, Prompt
from weft_gateway.openai.chat import CHAT, CHATS, chat_of
from weft_gateway.openai.completions import COMPLETIONS
from weft_gateway.openai.embeddings import EMBEDDINGS, POOLING, RERANK, SCORE, RerankRequest, ScoreRequest
from weft_gateway.openai.fields import MAX_VALUES
from weft_gateway.openai.files import UploadForm
from weft_gateway.openai.http_requests import TURN, in_turns
from weft_gateway.openai.lines import LINES_AT_ONCE, LineRunner
from weft_gateway.openai.load_adapters import LoadRequest, UnloadRequest
from weft_gateway.openai.logprobs import LEAST
from weft_gateway.openai.messages import CountRequest, MessagesEndpoint
from weft_gateway.openai.prepare import select_form
from weft_gateway.openai.response_format import ChatEncoder, CompletionEncoder, ResponseEncoder
from weft_gateway.openai.responses import MAX_STORED_VALUES, ResponsesChat, ResponsesEndpoint
from weft_gateway.openai.schema import ChatRequest, Common, CompletionRequest, StreamOptions, parse
from weft_gateway.openai.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, tokenize_request
from weft_gateway.openai.usage import CallUsage
