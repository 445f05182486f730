"""A real S3 server for tests: versitygw, which keeps objects as files below a temporary folder."""

import contextlib
import json
import socket
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

from harness.ports import free_port
from harness.waiting import PATIENCE_S, wait_until
from weft_devcluster.processes import Process
from weft_devcluster.tools import path as tool

ROOT_KEYS = {"accessKeyId": b"weft-root", "secretAccessKey": b"weft-root-secret"}


@dataclass(frozen=True)
class S3Server:
    """A running one, and a client with its owner's rights."""

    url: str
    client: Any
    process: Process

    def bucket(self, name: str, *, public: bool = False) -> None:
        self.client.create_bucket(Bucket=name)
        if public:
            what = [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"]
            may = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": what}
            self.client.put_bucket_policy(Bucket=name, Policy=json.dumps({"Statement": [may]}))

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            self.put(bucket, f"{prefix}/{path.name}", path.read_bytes())


@contextlib.contextmanager
def s3_server(folder: Path) -> Generator[S3Server]:
    """Raises ToolMissing where versitygw is not built."""
    command, port = tool("versitygw"), free_port()
    (folder / "objects").mkdir(parents=True)
    keys = {name: value.decode() for name, value in ROOT_KEYS.items()}
    flags = ["--port", f"127.0.0.1:{port}", "--access", keys["accessKeyId"], "--secret", keys["secretAccessKey"]]
    process = Process("versitygw", [command, *flags, "--quiet", "posix", folder / "objects"], folder)
    try:
        wait_until(lambda: listens(port, process), "versitygw listens")
        url = f"http://127.0.0.1:{port}"
        yield S3Server(url, _client(url, keys), process)
    finally:
        process.end()


def _client(url: str, keys: dict[str, str]) -> Any:
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=keys["accessKeyId"],
        aws_secret_access_key=keys["secretAccessKey"],
        config=Config(s3={"addressing_style": "path"}),
    )


def listens(port: int, process: Process) -> bool:
    """A port tells of nobody who waits, so it is asked."""
    process.check()
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), PATIENCE_S):
        return True
    return False
