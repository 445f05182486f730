# pyright: reportUnusedImport=false
"""The gateway's machine: requests from their arrival to their outcomes. No loop, no socket, no clock.

Other packages import names from here only: the modules of this package may change.
"""

from weft_gateway.core.answer_text import Detokeniser
from weft_gateway.core.config import MAX_UNACKED, GatewayConfig
from weft_gateway.core.connection_places import ConnectionPlaces
from weft_gateway.core.events import (
    PREDICTOR,
    SCHEDULER,
    OpenSession,
    PreparedRequest,
    Proceed,
    RequestReady,
    TokenizerChanged,
    TokenizerState,
)
from weft_gateway.core.gateway import Gateway
from weft_gateway.core.routes import ANY_NAMESPACE, Principal, RouteIndex
from weft_gateway.core.stream import RequestStream
