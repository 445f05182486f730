# pyright: reportUnusedImport=false
"""The gateway's machine: requests from their arrival to their outcomes. No loop, no socket, no clock.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_gateway.core.admission import Answer
from weft_gateway.core.answer_text import MAX_STOP_CHARS, MAX_STOPS, Detokeniser, StopMatcher
from weft_gateway.core.config import MAX_UNACKED, GatewayConfig
from weft_gateway.core.connection_places import ConnectionPlaces
from weft_gateway.core.events import (
    PREDICTOR,
    SCHEDULER,
    CheckSession,
    ClientGone,
    Drained,
    DrainStarted,
    Effect,
    Emit,
    End,
    Event,
    Failure,
    Finish,
    FirstToken,
    OpenSession,
    OutcomeDropped,
    PeerViolation,
    PreparedRequest,
    Proceed,
    Refuse,
    RequestAborted,
    RequestFailed,
    RequestHeld,
    RequestReady,
    RoutesChanged,
    SessionAlive,
    Submitted,
    TokenizerChanged,
    TokenizerState,
    TokenLogprobOut,
)
from weft_gateway.core.gateway import Gateway
from weft_gateway.core.history import MAX_NAMESPACES, MINUTES, History, Tally, UsageSum, bucket_of, quantile, summed
from weft_gateway.core.limits import REPORT_S, SILENT_S, SWEEP, Charge, Exceeded, Limiter, Remaining, rules_for
from weft_gateway.core.refusal_pacing import HOLD_S, MAX_HELD, QUICK_BURST, QUICK_PER_S, RefusalPacing
from weft_gateway.core.routes import ANY_NAMESPACE, Principal, RouteIndex, UnknownVersion, route_of_draw
from weft_gateway.core.standing import places_by_digest, standing
from weft_gateway.core.stream import (
    HoldExpired,
    PoolAvailability,
    RequestStream,
    SessionLost,
    StreamEffect,
    StreamEvent,
    runner_peer,
)
