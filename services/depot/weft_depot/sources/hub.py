"""The two calls of a Hugging Face hub that the depot makes: what is in a revision, and a range of a file.

`huggingface_hub` names URLs and headers; its own downloads are not used: they keep a cache of links, try again for as
long as a server asks them to, and share one client. Redirects are followed by hand: the token stays at the hub, and
nothing leads to addresses inside.
"""

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, parse_ratelimit_headers

from weft.artifacts.errors import ArtifactError, Reason, Refused
from weft.domain.strict_json import JsonError, parse_object
from weft_depot.sources.addresses import split_url
from weft_depot.sources.http import AGAIN, Origin, SourceHttp, byte_range, range_of, retry_after, too_many
from weft_depot.sources.retry_policy import RetryPolicy, TransientError

MAX_LISTING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository, as one caller sees it."""

    name: str
    token: str | None = field(default=None, repr=False)


class Hub:
    """A client of one hub endpoint, usable from any thread."""

    def __init__(self, endpoint: str, policy: RetryPolicy) -> None:
        """Take the endpoint. Raises Refused(EndpointNotAllowed) for what is no URL."""
        parts = split_url(endpoint, "the hub")
        self.endpoint, self.host = endpoint.rstrip("/"), parts.netloc
        self._origin = Origin(self.endpoint, f"hf: {self.host}")
        self._policy, self._http = policy, SourceHttp(policy)

    def close(self) -> None:
        self._http.close()

    def revision(self, repo: Repo, revision: str) -> dict[str, Any]:
        """Read a revision as the hub describes it: `sha` and `siblings` with sizes and content ids.

        Raises Refused (SourceNotFound, SourceForbidden, TooLarge), Unavailable.
        """
        url = f"{self.endpoint}/api/models/{repo.name}/revision/{quote(revision, safe='')}?blobs=true"
        return self._policy.retry(f"hf:{repo.name}: {self.host}", lambda: self._object(url, repo))

    @contextlib.contextmanager
    def fetch(
        self, repo: Repo, path: str, sha: str, size_bytes: int, start: int, end: int
    ) -> Generator[Iterator[bytes]]:
        """Fetch the bytes [start, end) of a commit's file that has `size_bytes`. See `ranged.Fetch`."""
        url = hf_hub_url(repo.name, path, revision=sha, endpoint=self.endpoint)
        with self._get(url, repo, byte_range(start, end)) as response:
            yield range_of(response, size_bytes, start, end)

    def _object(self, url: str, repo: Repo) -> dict[str, Any]:
        with self._get(url, repo, {}) as response:
            raw = self._http.body(response, MAX_LISTING_BYTES, f"the listing of hf:{repo.name}")
        try:
            return parse_object(raw, max_bytes=MAX_LISTING_BYTES)
        except JsonError as error:
            raise TransientError(f"the listing is no JSON: {error}") from error

    def _get(self, url: str, repo: Repo, headers: dict[str, str]) -> contextlib.AbstractContextManager[httpx2.Response]:
        """Make one request. Raises TransientError, Refused, Unavailable."""
        given = build_hf_headers(token=repo.token or False, library_name="weft-depot", headers=headers)
        return self._http.get(
            url, given, self._origin, lambda answer: _meaning(answer, repo, f"hf:{repo.name} at {self.host}")
        )


def _meaning(response: httpx2.Response, repo: Repo, about: str) -> ArtifactError | TransientError:
    """The error that a hub's answer stands for: Refused, Unavailable (429), TransientError."""
    status, code = response.status_code, response.headers.get("x-error-code", "")
    if status == 429:
        limit = parse_ratelimit_headers(response.headers)
        return too_many(f"{about}", retry_after(response) or (limit.reset_in_seconds if limit else 0))
    if status in AGAIN:
        return TransientError(f"status {status}")
    if code == "GatedRepo":
        return Refused(Reason.SOURCE_FORBIDDEN, f"{about} is gated; accept its terms there, and {_token(repo)}")
    if code in ("RevisionNotFound", "EntryNotFound"):
        missing = "revision" if code == "RevisionNotFound" else "file"
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about} has no such {missing}")
    if status in (401, 403) and code != "RepoNotFound":
        return Refused(Reason.SOURCE_FORBIDDEN, f"{about} answered {status}; {_token(repo)}")
    if status in (401, 404):
        return Refused(Reason.SOURCE_NOT_FOUND, f"{about} does not exist, or is private: then {_token(repo)}")
    return Refused(Reason.SOURCE_NOT_FOUND, f"{about} answered {status}: correct the URI or the revision")


def _token(repo: Repo) -> str:
    if repo.token:
        return "give the Secret of credentialsRef a token that may read it"
    return "name a Secret with a token in credentialsRef"
