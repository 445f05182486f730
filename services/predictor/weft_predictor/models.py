"""The choice of the serving model, saved, mounted, replayed or cold, and of models mounted later."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from weft.telemetry.logs import kv
from weft_predictor import metrics
from weft_predictor.checkpoint import load
from weft_predictor.core import replayed_lengths
from weft_predictor.core.length_model import Arrays, LengthModel
from weft_predictor.core.promotion import PromotedModel
from weft_predictor.core.replayed_lengths import ReplayedLengths
from weft_predictor.core.ridge_model import LAYOUT, RidgeModel
from weft_predictor.encoder_files import CALIBRATION, CONFIG, TOKENIZER, WEIGHTS, read_model
from weft_predictor.errors import BadData, CorruptModel, OtherLayout, PredictorError

REPLAY = "replay:"
MAX_REPLAY_BYTES = 1 << 30
SAVED = "model.npz"  # in the data directory
log = logging.getLogger(__name__)


def first_models(data_dir: Path, mounted: Path | None) -> tuple[LengthModel, LengthModel | None]:
    """Choose the serving model, and a candidate to compare with it.

    The saved model serves, else the mounted model, else a cold model. If the mounted model has another fit than the
    saved model, it is the candidate. An unreadable saved model is set aside under a logged name. An unreadable mounted
    model is an error if no saved model can serve (CorruptModel, BadData, OSError), else it is logged.
    """
    if mounted is not None and str(mounted).startswith(REPLAY):
        return read_replay(Path(str(mounted).removeprefix(REPLAY))), None
    refused = None
    try:
        trained = read_model(mounted) if mounted else None
    except (PredictorError, OSError) as error:
        trained, refused = None, error
    saved = _load_saved(data_dir / SAVED, partial(_read_saved, mounted=trained))
    if saved:
        if refused:
            refuse(mounted, refused)
        return saved, trained if trained and trained.family != saved.family else None
    if refused:
        raise refused
    return trained or RidgeModel.cold(f"ridge-{secrets.token_hex(4)}"), None


def read_replay(path: Path) -> ReplayedLengths:
    """Read predictions from a file of JSON lines. Raises BadData, OSError."""
    if (size := path.stat().st_size) > MAX_REPLAY_BYTES:
        raise BadData(f"{path}: {size} bytes, the limit is {MAX_REPLAY_BYTES}")
    try:
        with path.open("rb") as lines:
            return ReplayedLengths(replayed_lengths.parse(lines))
    except BadData as error:
        raise BadData(f"{path}, {error}") from error


def offer(model: PromotedModel, candidate: LengthModel) -> None:
    """Offer a candidate for judgement, in the thread of the model."""
    metrics.MODELS.labels("offered").inc()
    log.info("model offered", extra=kv(candidate=candidate.version, served=model.version))
    model.offer(candidate)


def refuse(path: Path | None, error: Exception) -> None:
    """Log an unreadable mounted model. The served model stays."""
    metrics.MODELS.labels("refused").inc()
    log.error("mounted model refused", extra=kv(path=path, error=type(error).__name__, detail=error))


class ModelWatch:
    """A watch that reads a mounted model again after its files change, and offers it as a candidate."""

    def __init__(self, path: Path, seconds: float, offer: Callable[[LengthModel], Awaitable[None]]) -> None:
        self._path, self._seconds, self._offer = path, seconds, offer
        self._read = self._seen = _files(path)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            await self.check_files()

    async def check_files(self) -> None:
        """Read changed files once they were stable for a check, so that they are complete."""
        files = _files(self._path)
        settled, self._seen = files == self._seen, files
        if not settled or files == self._read:
            return
        self._read = files
        try:
            model = await asyncio.to_thread(read_model, self._path)
        except (PredictorError, OSError) as error:
            refuse(self._path, error)
        else:
            await self._offer(model)


def _files(path: Path) -> list[tuple[str, int, int]]:
    """List name, size and time of change of the model's present files."""
    files = list[tuple[str, int, int]]()
    for name in (CONFIG, TOKENIZER, WEIGHTS, CALIBRATION) if path.is_dir() else ("",):
        with contextlib.suppress(FileNotFoundError):
            status = (path / name).stat()
            files.append((name, status.st_size, status.st_mtime_ns))
    return files


def _load_saved(path: Path, read: Callable[[Arrays], RidgeModel]) -> RidgeModel | None:
    """Read the saved model; None: no readable model. A model of another version waits for that version."""
    try:
        return load(path, read)
    except FileNotFoundError:
        log.info("no saved model yet", extra=kv(path=path))
    except CorruptModel as error:
        aside = (
            _of_layout(path, error.layout) if isinstance(error, OtherLayout) else path.with_name(f"{path.name}.corrupt")
        )
        path.replace(aside)
        log.error("saved model set aside", extra=kv(error=error, aside=aside))
    if not (earlier := _of_layout(path, LAYOUT)).exists():
        return None
    log.info("saved model of this version found again", extra=kv(path=earlier))
    earlier.replace(path)
    return _load_saved(path, read)


def _of_layout(path: Path, layout: int) -> Path:
    return path.with_name(f"{path.name}.layout{layout % 1_000}")


def _read_saved(arrays: Arrays, *, mounted: RidgeModel | None) -> RidgeModel:
    """Read a saved model of hashed grams, or of the classes of the mounted network."""
    if not (name := RidgeModel.features_of(arrays)):
        return RidgeModel.load(arrays)
    if mounted is None or mounted.featurizer.name != name:
        raise CorruptModel(f"its network, {name}, is not mounted")
    return RidgeModel.load(arrays, mounted.featurizer)
