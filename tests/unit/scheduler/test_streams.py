"""One stream a peer: the older one has no voice once a newer is there."""

from weft.wire.v1 import scheduler_pb2 as pb
from weft_scheduler.core import events as ev
from weft_scheduler.streams import GatewayStream, Peers, SupervisorStream

HELLO = pb.GatewayToScheduler(hello=pb.GatewayHello(gateway_id="g"))
COMPLETE = pb.GatewayToScheduler(hello=pb.GatewayHello(gateway_id="g", resubmit_complete=True))
CANCEL = pb.GatewayToScheduler(cancel=pb.Cancel(request_id="r"))


def test_what_an_older_stream_still_delivers_is_dropped() -> None:
    heard: list[ev.Event] = []
    peers: Peers[pb.SchedulerToGateway] = Peers()
    older, newer = GatewayStream(peers, heard.append), GatewayStream(peers, heard.append)
    older.heard(HELLO)
    newer.heard(HELLO)
    assert older.outbox.closed
    older.heard(CANCEL)
    older.heard(COMPLETE)
    older.ended()
    assert heard == [ev.GatewayUp("g"), ev.GatewayUp("g")]
    newer.heard(COMPLETE)
    newer.ended()
    newer.ended()
    assert heard[2:] == [ev.ResubmitComplete("g"), ev.GatewayDown("g")]


def test_an_older_supervisor_stream_cannot_report_nor_take_the_newer_down() -> None:
    heard: list[ev.Event] = []
    peers: Peers[pb.SchedulerToSupervisor] = Peers()
    older, newer = SupervisorStream(peers, heard.append), SupervisorStream(peers, heard.append)
    for stream in (older, newer):
        stream.heard(pb.SupervisorToScheduler(hello=pb.SupervisorHello(supervisor_id="s")))
    older.heard(pb.SupervisorToScheduler(report=pb.ClusterReport()))
    older.ended()
    assert heard == [ev.SupervisorUp("s"), ev.SupervisorUp("s")]
    newer.heard(pb.SupervisorToScheduler(report=pb.ClusterReport()))
    assert heard[2:] == [ev.ClusterReport("s")]


def test_a_stream_that_never_said_who_it_is_ends_unnoticed() -> None:
    heard: list[ev.Event] = []
    GatewayStream(Peers(), heard.append).ended()
    assert not heard
