"""Storage of files' bytes on S3, with multipart uploads: memory holds a part of a file.

Credentials are a folder (a mounted Secret) with accessKeyId, secretAccessKey and, for temporary credentials,
sessionToken. Alternatively they come from the process's environment, if its pod has an identity with access to the
bucket.
"""

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import urllib3
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from weft.process import CannotStart
from weft.s3 import KEYS, error_code, missing_keys, s3_client
from weft_batch.errors import BytesMissing, StorageUnavailable

PART_BYTES = 8 << 20  # S3 takes 10,000 parts of at least 5 MiB
CONNECT_S, READ_S, TRIES = 5.0, 30.0, 3
_PLACE = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[A-Za-z0-9._/-]*))?", re.ASCII)


class S3NotUsable(CannotStart):
    """`--files` or its credentials cannot be used."""


def parse_place(uri: str) -> tuple[str, str]:
    """Split `s3://bucket/prefix` into the bucket and the prefix, empty or with a slash at its end. Raises
    ValueError."""
    match = _PLACE.fullmatch(uri)
    if match is None or ".." in uri:
        raise ValueError(f"{uri!r} is not s3://BUCKET/PREFIX")
    prefix = (match["prefix"] or "").strip("/")
    return match["bucket"], f"{prefix}/" if prefix else ""


def read_keys(folder: Path) -> dict[str, str]:
    """Read a Secret's entries. Raises S3NotUsable."""
    keys: dict[str, str] = {}
    for name in KEYS:
        with contextlib.suppress(FileNotFoundError):
            keys[name] = (folder / name).read_text().strip()
    if missing := missing_keys([name for name, value in keys.items() if value]):
        raise S3NotUsable(f"--s3-credentials {folder} has no file {' and no file '.join(missing)}")
    return keys


class S3Storage:
    """A prefix in a bucket. Several processes may share it: names are random."""

    def __init__(self, uri: str, *, endpoint: str, region: str, keys: dict[str, str] | None) -> None:
        """Make a client. Without keys it uses the process's credentials. Raises ValueError, S3NotUsable."""
        self._bucket, self._prefix = parse_place(uri)
        session = Session()
        if keys is None and session.get_credentials() is None:
            raise S3NotUsable("--s3-pod-identity: the pod has no identity at AWS: annotate its service account")
        self._client = s3_client(
            session, endpoint or None, region, keys, connect_s=CONNECT_S, read_s=READ_S, tries=TRIES, connections=16
        )

    def writer(self, name: str) -> "S3Writer":
        return S3Writer(self._client, {"Bucket": self._bucket, "Key": self._prefix + name})

    def read(self, name: str, offset: int, length: int) -> bytes:
        with _storage_errors():
            options = {"Range": f"bytes={offset}-{offset + length - 1}"}
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name, **options)
            except ClientError as error:
                if error_code(error) == "InvalidRange":  # at or after the end
                    return b""
                raise
            with answer["Body"] as body:
                return body.read()

    def delete(self, name: str) -> None:
        key = self._prefix + name
        with _storage_errors():
            left: Any = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=key)
            for upload in left.get("Uploads", ()):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload["UploadId"])
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def clean(self) -> int:
        """Do nothing: other processes may be writing. The store's rows show incomplete files (weft/store/files.py)."""
        return 0


class S3Writer:
    """A writer of parts of 8 MiB. A smaller file is put at once. The file appears when the writer is closed."""

    def __init__(self, client: Any, place: dict[str, str]) -> None:
        self._client, self._place = client, place
        self._buffer = bytearray()
        self._upload_id = ""
        self._parts: list[dict[str, Any]] = []

    def write(self, chunk: bytes) -> None:
        self._buffer += chunk
        while len(self._buffer) >= PART_BYTES:
            self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    def close(self) -> None:
        with _storage_errors():
            if not self._upload_id:
                self._client.put_object(Body=bytes(self._buffer), **self._place)
                return
            if self._buffer:
                self._send(bytes(self._buffer))
            parts = {"Parts": self._parts}
            self._client.complete_multipart_upload(UploadId=self._upload_id, MultipartUpload=parts, **self._place)

    def abandon(self) -> None:
        with contextlib.suppress(BotoCoreError, ClientError, urllib3.exceptions.HTTPError):
            if self._upload_id:
                self._client.abort_multipart_upload(UploadId=self._upload_id, **self._place)

    def _send(self, part: bytes) -> None:
        with _storage_errors():
            if not self._upload_id:
                self._upload_id = str(self._client.create_multipart_upload(**self._place)["UploadId"])
            number = len(self._parts) + 1
            sent = self._client.upload_part(PartNumber=number, UploadId=self._upload_id, Body=part, **self._place)
            self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})


@contextlib.contextmanager
def _storage_errors() -> Generator[None]:
    """Turn botocore's errors into StorageError. Their text is not repeated, since it may quote signed values."""
    try:
        yield
    except ClientError as error:
        if error_code(error) in ("NoSuchKey", "404"):
            raise BytesMissing("the file's bytes are not in storage") from None
        raise StorageUnavailable(f"file storage answered {error_code(error)[:60]}") from None
    except (BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
        raise StorageUnavailable(f"file storage: {type(error).__name__}") from error
