"""Defaults, then environment, then flags; wrong values are all listed."""

import pytest

from weft_scheduler.core import SchedulerConfig
from weft_scheduler.settings import SchedulerSettings


def test_flags_win_over_the_environment_and_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SchedulerSettings.parse([]).config() == SchedulerConfig()
    monkeypatch.setenv("WEFT_SCHEDULER__ASSIGN_MS", "100")
    monkeypatch.setenv("WEFT_SCHEDULER__AVOID_MS", "200")
    settings = SchedulerSettings.parse(["--assign-ms", "300"])
    assert (settings.assign_ms, settings.avoid_ms, settings.drain_s) == (300, 200, 300)
    config = settings.config()
    assert (config.assign_s, config.avoid_s, config.drain_s) == (0.3, 0.2, 300.0)


def test_the_help_teaches_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SchedulerSettings.parse(["--help"])
    text = capsys.readouterr().out
    for name, field in SchedulerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
