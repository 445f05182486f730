"""Defaults, then environment, then flags; wrong values are all listed."""

import pytest

from weft_scheduler.core import SchedulerConfig
from weft_scheduler.settings import SchedulerSettings


def test_flags_win_over_the_environment_and_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SchedulerSettings.parse([]).config() == SchedulerConfig()
    monkeypatch.setenv("WEFT_SCHEDULER__KEYS_GRACE_S", "100")
    assert SchedulerSettings.parse([]).config() == SchedulerConfig(keys_grace_s=100.0)
    assert SchedulerSettings.parse(["--keys-grace-s", "300"]).config() == SchedulerConfig(keys_grace_s=300.0)


def test_the_help_teaches_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SchedulerSettings.parse(["--help"])
    text = capsys.readouterr().out
    for name, field in SchedulerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
