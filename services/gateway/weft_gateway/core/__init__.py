# pyright: reportUnusedImport=false
"""The gateway's machine: requests from their arrival to their outcomes. No loop, no socket, no clock.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_gateway.core.answer_text import MAX_STOP_CHARS, MAX_STOPS, Detokeniser, HeldLogprobs, StopMatcher
from weft_gateway.core.config import GatewayConfig
from weft_gateway.core.events import (
    PREDICTOR,
    SCHEDULER,
    ClientGone,
    Effect,
    Emit,
    Event,
    Failure,
    Finish,
    OpenSession,
    PreparedRequest,
    Proceed,
    RequestHeld,
    RequestReady,
    TokenizerChanged,
    TokenizerState,
    TokenLogprobOut,
)
from weft_gateway.core.gateway import Gateway
from weft_gateway.core.history import History, Tally, UsageSum
from weft_gateway.core.limits import Charge, Exceeded, Limiter
from weft_gateway.core.routes import ANY_NAMESPACE, Principal, RouteIndex, UnknownVersion
from weft_gateway.core.stream import RequestStream, SessionLost, StreamEffect, runner_peer
