"""Uploads: an adapter's files as a form become a source of the namespace that sent them, and of no other."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from harness.waiting import soon
from tests.unit.artifacts.making import lora, pack, write_adapter
from tests.unit.depot.conftest import Bench
from weft.artifacts.errors import Refused
from weft.domain.adapter import FILES, OPTIONAL_FILES
from weft.wire import upload_rate
from weft_depot import server
from weft_depot.artifact_layout import ADAPTER_FILES, ArtifactLimits
from weft_depot.core import Operations
from weft_depot.server import build_app
from weft_depot.service import Depot
from weft_depot.sources import UploadedSource

CONFIG, WEIGHTS, *TOKENIZER = ADAPTER_FILES


class Uploading:
    """A depot that takes uploads, and its clock."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.now = bench, 0.0
        self.open()

    def open(self) -> None:
        """A new process on the same folders."""
        self.bench.open()
        sources: Any = self.bench.resolver.sources
        sources["depot"] = UploadedSource(self.bench.store, self.bench.resolutions)
        self.serve()

    def serve(self) -> None:
        """A new process on the same resolver."""
        self.depot = Depot(self.bench.resolver, operations=Operations(keep_s=600), now=lambda: self.now)
        transport = httpx2.ASGITransport(app=build_app(self.depot))
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://depot")

    async def put(self, files: dict[str, bytes], namespace: str = "acme") -> httpx2.Response:
        form = [(name, (name, content)) for name, content in files.items()]
        return await self.http.put("/v1/uploads", params={"namespace": namespace}, files=form)


@pytest.fixture
async def uploading(bench: Bench) -> AsyncIterator[Uploading]:
    uploading = Uploading(bench)
    yield uploading
    uploading.depot.close()
    await uploading.http.aclose()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """What PEFT writes for the tiny model."""
    folder = write_adapter(tmp_path / "sent")
    for name in TOKENIZER:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return {name: (folder / name).read_bytes() for name in ADAPTER_FILES}


def test_those_who_send_an_adapter_send_all_of_it() -> None:
    assert {*FILES, *OPTIONAL_FILES} == set(ADAPTER_FILES)


async def test_an_upload_is_what_the_same_folder_would_be_and_resolves_for_its_namespace_alone(
    uploading: Uploading, files: dict[str, bytes]
) -> None:
    for name in TOKENIZER:
        path = uploading.bench.root / "adapters" / "upper" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(files[name])
    stored = (await uploading.put(files)).json()
    assert stored["sizeBytes"] == sum(map(len, files.values()))
    assert uploading.bench.resolve(stored["uri"], namespace="acme") == stored["digest"]
    assert uploading.bench.verdicts[0]["rank"] == 4
    assert stored["digest"] == uploading.bench.resolve("file:adapters/upper")
    with pytest.raises(Refused, match="namespace globex has uploaded no adapter"):
        uploading.bench.resolve(stored["uri"], namespace="globex")


async def test_an_upload_survives_a_restart_while_an_object_names_it_and_goes_otherwise(
    uploading: Uploading, files: dict[str, bytes]
) -> None:
    stored = (await uploading.put(files)).json()
    base = uploading.bench.base()
    await uploading.depot.retain((base,))  # its operation is remembered: it stays though nobody names it
    assert uploading.bench.store.holds(stored["digest"])
    await uploading.depot.retain((base, stored["digest"]))
    uploading.open()
    assert uploading.bench.resolve(stored["uri"], namespace="acme") == stored["digest"]
    await uploading.depot.retain((base,))
    assert not uploading.bench.store.has(stored["digest"])
    with pytest.raises(Refused, match="upload it again"):
        uploading.bench.resolve(stored["uri"], namespace="acme")


async def test_a_finished_operation_keeps_its_upload_for_its_time(
    uploading: Uploading, files: dict[str, bytes]
) -> None:
    stored = (await uploading.put(files)).json()
    uploading.now = 601.0
    uploading.depot.forget()
    await uploading.depot.retain(())
    assert not uploading.bench.store.has(stored["digest"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({CONFIG: None}, "MissingFile"),
        ({WEIGHTS: None}, "MissingFile"),
        ({"adapter_model.bin": b"pickle"}, "MissingFile"),
        ({"../adapter_config.json": b"{}"}, "MissingFile"),
        ({CONFIG: b"{"}, "ConfigInvalid"),
        ({CONFIG: json.dumps({"peft_type": "PREFIX_TUNING"}).encode()}, "UnsupportedAdapter"),
        ({WEIGHTS: b"\x00" * 100}, "HeaderInvalid"),
        ({WEIGHTS: b"\xff" * 100}, "HeaderTooLarge"),
    ],
)
async def test_what_is_no_adapter_is_refused_by_name_and_leaves_nothing(
    uploading: Uploading, files: dict[str, bytes], change: dict[str, bytes | None], reason: str
) -> None:
    sent = {name: content for name, content in {**files, **change}.items() if content is not None}
    response = await uploading.put(sent)
    assert (response.status_code, response.json()["reason"]) == (422, reason), response.text
    assert uploading.bench.blobs() == set()
    assert uploading.depot.operations.counts()["Failed"] == 1


async def test_weights_that_are_no_numbers_are_refused(uploading: Uploading, files: dict[str, bytes]) -> None:
    tensors = lora()
    name, (dtype, values) = next(iter(tensors.items()))
    values[0, 0] = float("nan")
    response = await uploading.put({**files, WEIGHTS: pack({**tensors, name: (dtype, values)})})
    assert (response.status_code, response.json()["reason"]) == (422, "NotFinite")


async def test_an_adapter_beyond_the_bound_is_refused_while_it_comes(
    uploading: Uploading, files: dict[str, bytes]
) -> None:
    object.__setattr__(uploading.bench.resolver, "limits", ArtifactLimits(adapter_bytes=len(files[CONFIG]) + 10))
    response = await uploading.put(files)
    assert (response.status_code, response.json()["reason"]) == (422, "TooLarge")


@pytest.mark.parametrize(
    ("headers", "params", "content", "status"),
    [
        ({"content-type": "application/json"}, {"namespace": "acme"}, b"{}", 415),
        ({"content-type": "multipart/form-data; boundary=x"}, {"namespace": "acme"}, b"--x\r\nnothing", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, {"namespace": "acme"}, b"", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, {"namespace": "../other"}, b"--x--", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, {}, b"--x--", 400),
        ({"content-type": "multipart/form-data; boundary=x"}, {"namespace": "acme"}, b"--x--", 422),
    ],
)
async def test_what_is_no_form_is_refused(
    uploading: Uploading, headers: dict[str, str], params: dict[str, str], content: bytes, status: int
) -> None:
    response = await uploading.http.put("/v1/uploads", params=params, headers=headers, content=content)
    assert response.status_code == status, response.text


async def test_an_upload_that_breaks_off_leaves_nothing(uploading: Uploading) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="a"; filename="adapter_config.json"\r\n\r\n{'
        raise ConnectionResetError

    headers = {"content-type": "multipart/form-data; boundary=x"}
    with pytest.raises(ConnectionResetError):
        await uploading.http.put("/v1/uploads", params={"namespace": "acme"}, headers=headers, content=broken())
    assert uploading.bench.blobs() == set()
    assert not list((uploading.bench.folder / "data" / "blobs" / "partial").iterdir())
    assert uploading.depot.operations.counts()["Pending"] == 0


async def test_slow_uploads_of_a_namespace_leave_slots_to_others_and_end(
    uploading: Uploading, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UPLOADS", 4)
    uploading.serve()
    begun, patience = asyncio.Semaphore(0), asyncio.Event()
    real = upload_rate.at_least_rate

    async def watched(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        begun.release()
        await patience.wait()
        async for chunk in real(body):
            yield chunk

    async def dripping() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await asyncio.Event().wait()

    async def drip() -> httpx2.Response:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        return await uploading.http.put(
            "/v1/uploads", params={"namespace": "acme"}, headers=headers, content=dripping()
        )

    monkeypatch.setattr(server, "at_least_rate", watched)
    monkeypatch.setattr(upload_rate, "GRACE_S", 0.01)
    slow = [asyncio.create_task(drip()) for _ in range(2)]
    for _ in slow:
        await soon(begun.acquire())
    refused = await uploading.put(files)
    assert (refused.status_code, refused.json()["reason"]) == (503, "Busy")
    patience.set()
    assert (await uploading.put(files, namespace="globex")).status_code == 201
    for response in await soon(asyncio.gather(*slow)):
        assert (response.status_code, response.json()["reason"]) == (408, "UploadTooSlow")
    assert (await uploading.put(files)).status_code == 201


async def test_uploads_that_no_object_names_are_bounded_by_namespace(
    uploading: Uploading, files: dict[str, bytes]
) -> None:
    size_bytes = sum(map(len, files.values()))
    object.__setattr__(uploading.bench.resolver, "limits", ArtifactLimits(adapter_bytes=size_bytes))
    uploading.serve()
    for _ in range(4):
        stored = (await uploading.put(files)).json()
    refused = await uploading.put(files)
    assert (refused.status_code, refused.json()["reason"]) == (507, "DepotFull")
    assert "name them in a LoRAAdapter" in refused.json()["message"]
    assert (await uploading.put(files, namespace="globex")).status_code == 201
    await uploading.depot.retain((stored["digest"],))
    for _ in range(4):
        assert (await uploading.put(files)).status_code == 201
    uploading.now = 601.0
    assert (await uploading.put(files)).status_code == 201, "the earlier ones are forgotten"
