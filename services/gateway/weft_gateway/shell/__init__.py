# pyright: reportUnusedImport=false
"""What touches the outside: HTTP, gRPC streams, tokenizer threads, metrics and logs around the machine of `core`.

Tests take these names from here: the modules behind them may change. `app`, `page` and `status` are imported by their
modules: they stand above `weft_gateway.openai`, which imports this package.
"""

from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.auth import Action, authenticate, check_scope
from weft_gateway.shell.bounded_http import BoundedHttp, ConnectionBound
from weft_gateway.shell.caller_turns import CallerTurns
from weft_gateway.shell.chunk_pacing import ChunkPacing
from weft_gateway.shell.depot_client import fetch_tokenizer_files
from weft_gateway.shell.metrics import GatewayMetrics
from weft_gateway.shell.oidc import BadToken, KeyPending, OidcConfig, TokenVerifier, context_for
from weft_gateway.shell.predictor_client import PredictorClient
from weft_gateway.shell.rate_limits import duration
from weft_gateway.shell.request_ids import Ids, drawn_ids
from weft_gateway.shell.request_manager import patience_of
from weft_gateway.shell.runner_session import RunnerSession
from weft_gateway.shell.tokenizer import ModelTokenizer, NotEncodable, TokenizerPanic, TooLong
from weft_gateway.shell.tokenizer_cache import TokenizerCache
from weft_gateway.shell.turnstile import THREAD_BYTES, BoundedTurnstile, RequestTurns
