"""The controller's own log: what is at rest writes nothing."""

import logging
from pathlib import Path

import httpx2

from weft_operator.local import LogFile, logging_to


async def test_a_request_to_the_depot_is_no_line_of_the_log(tmp_path: Path) -> None:
    logfile = LogFile(tmp_path / "controller.log")
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, request=request))
    with logging_to(logfile, "INFO"):
        async with httpx2.AsyncClient(transport=transport, base_url="http://depot") as http:
            await http.get("/v1/operations/op1")
        logging.getLogger("weft_operator").info("but this is")
    assert [line.split(maxsplit=3)[3] for line in logfile.tail(10)] == ["but this is"]
    logfile.close()
