"""Settings of a process: flags over environment over defaults, and every wrong one told in one form."""

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from weft.settings import Address, ProcessSettings, data_dir_field


class Settings(ProcessSettings):
    """A process."""

    model_config = SettingsConfigDict(env_prefix="WEFT_X__", cli_prog_name="weft_x")

    listen: Address = Field("127.0.0.1:1", description="HOST:PORT")
    data_dir: Path = data_dir_field("x", "what it keeps")
    lease_ms: int = Field(100, ge=1, description="how long")


def test_flags_win_over_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_X__LEASE_MS", "5")
    monkeypatch.setenv("WEFT_X__LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("WEFT_DATA_DIR", "/w")
    settings = Settings.parse(["--listen", "127.0.0.1:3"])
    assert (settings.listen, settings.lease_ms, settings.log_level) == ("127.0.0.1:3", 5, "INFO")
    assert settings.data_dir == Path("/w/x")


def test_without_arguments_the_process_own_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["weft_x", "--lease-ms", "7"])
    assert Settings.parse(None).lease_ms == 7


def test_every_wrong_setting_is_told_with_flag_value_and_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_X__LEASE_MS", "0")
    with pytest.raises(SystemExit) as ended:
        Settings.parse(["--listen", "nowhere", "--log-level", "LOUD"])
    assert ended.value.code == 2
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == "weft_x: wrong settings"
    assert sorted(line.split(": ")[0] for line in lines) == [
        "  --lease-ms '0'",
        "  --listen 'nowhere'",
        "  --log-level 'LOUD'",
    ]
    assert "address 'nowhere' is not HOST:PORT" in "".join(lines)


def test_a_variable_of_no_setting_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WEFT_Y__LEASE_MS", "0")
    monkeypatch.setenv("WEFT_X__LEASES_MS", "0")
    with pytest.raises(SystemExit):
        Settings.parse([])
    assert "unknown environment variables: WEFT_X__LEASES_MS; --help lists" in capsys.readouterr().err


def test_help_names_the_rule_of_the_data_directory_and_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_DATA_DIR", "/somewhere/private")
    with pytest.raises(SystemExit):
        Settings.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "$WEFT_DATA_DIR/x, else ~/.local/state/weft/x" in text
    assert "/somewhere/private" not in text
