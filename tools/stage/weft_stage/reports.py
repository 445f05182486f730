"""What a supervisor knows of its runners: sequences and their progress, adapters and their tiers."""

import grpc.aio

from weft.domain.runner import RunnerBook
from weft.wire.codec.cluster import REPORTED
from weft.wire.v1 import supervisor_pb2, supervisor_pb2_grpc

TIMEOUT_S = 120.0


async def runners(supervisor: str) -> list[RunnerBook]:
    """The supervisor's runners."""
    async with grpc.aio.insecure_channel(supervisor) as channel:
        return books(await listed(supervisor_pb2_grpc.AdminStub(channel)))


async def listed(admin: supervisor_pb2_grpc.AdminStub) -> supervisor_pb2.ListRunnersResponse:
    return await admin.ListRunners(supervisor_pb2.ListRunnersRequest(), timeout=TIMEOUT_S, wait_for_ready=True)


def books(answer: supervisor_pb2.ListRunnersResponse) -> list[RunnerBook]:
    return [RunnerBook.of_report(REPORTED.read(one)) for one in answer.runners]
