"""Started without a flag, processes on one machine listen beside each other and find each other."""

from collections import Counter
from typing import Any

import pytest

from weft.settings import ProcessSettings
from weft_batch.settings import BatchSettings as Batch
from weft_depot.settings import DepotSettings as Depot
from weft_gateway.settings import GatewaySettings as Gateway
from weft_operator.kubernetes import Settings as Operator
from weft_predictor.settings import PredictorSettings as Predictor
from weft_runner.settings import parse_settings
from weft_scheduler.settings import SchedulerSettings as Scheduler
from weft_supervisor.settings import SupervisorSettings as Supervisor

PROCESSES: list[type[ProcessSettings]] = [Batch, Depot, Gateway, Operator, Predictor, Scheduler, Supervisor]
LISTENS = {
    "scheduler": Scheduler.model_fields["listen"].default,
    "predictor": Predictor.model_fields["listen"].default,
    "batch": Batch.model_fields["listen"].default,
    "supervisor": Supervisor.model_fields["listen"].default,
    "depot": f"http://{Depot.model_fields['http'].default}",
}


def defaults(process: type[ProcessSettings], *names: str) -> dict[str, Any]:
    """Return the defaults of a process's fields that have these names."""
    return {name: field.default for name, field in process.model_fields.items() if name in names and field.default}


def test_no_two_processes_listen_on_one_port() -> None:
    listening = [defaults(process, "listen", "http", "probes").values() for process in PROCESSES]
    ports = Counter(address.rpartition(":")[2] for addresses in listening for address in addresses)
    assert len(ports) == 11
    assert set(ports.values()) == {1}


def test_everybody_is_looked_for_where_it_listens() -> None:
    looked_for = [defaults(process, *LISTENS) for process in PROCESSES]
    assert sum(map(len, looked_for)) == 7
    assert all(LISTENS[name] == address for found in looked_for for name, address in found.items())


def test_the_example_of_a_runner_meets_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    example = " ".join(capsys.readouterr().out.partition("example:")[2].split())
    assert f"--supervisor {LISTENS['supervisor']} " in example
    assert f"--depot {LISTENS['depot']} " in example
