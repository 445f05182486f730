"""APIKey: a key for the models of its namespace, kept in a Secret."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from weft.api.fields import ApiModel, DurationText, Label, ObjectName, Rule, Timestamp, duration_s
from weft.api.meta import Conditions, Resource, is_empty

MODEL_PATTERN = r"^[A-Za-z0-9*?]([A-Za-z0-9._:/*?@-]*[A-Za-z0-9*?])?$"
MIN_EXPIRES_AFTER_S = 60
Limit = Annotated[int, Field(strict=True, ge=1, le=1 << 50)]


class KeyLimits(ApiModel):
    """Limits of the key on all models together. They hold beside those that the platform sets for the namespace or
    the key: a request is admitted where all of them have room."""

    requests_per_minute: Limit | None = None
    """The number of requests that are admitted in a minute. Without it requests are not counted."""
    tokens_per_minute: Limit | None = None
    """The number of tokens, of prompts and answers, in a minute. Without it tokens are not counted."""
    concurrent: Limit | None = None
    """The number of requests that run or wait at the same time. Without it they are not counted."""
    tokens_per_day: Limit | None = None
    """The number of tokens in a day (UTC). When they are used up, requests are refused until the day ends."""


class KeySecretRef(ApiModel):
    """A Secret of the APIKey's namespace that somebody else writes, for example Sealed Secrets or External Secrets."""

    name: ObjectName
    """The name of the Secret."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = "key"
    """The entry of the Secret that holds the key: 32 to 512 printable ASCII characters, without spaces inside."""


def _one_expiry(spec: "APIKeySpec") -> bool:
    return spec.expires_at is None or spec.expires_after is None


class APIKeySpec(ApiModel):
    """The desired state. No controller of Weft writes it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "expiresAfter",
            "set either expiresAt or expiresAfter",
            "!has(self.expiresAt) || !has(self.expiresAfter)",
            _one_expiry,
        ),
        Rule(
            "expiresAfter",
            "expiresAfter counts from the making of the key: with secretRef set expiresAt",
            "!has(self.expiresAfter) || !has(self.secretRef)",
            lambda spec: spec.expires_after is None or spec.secret_ref is None,
        ),
        Rule(
            "expiresAfter",
            f"expiresAfter has to be at least {MIN_EXPIRES_AFTER_S}s",
            f"!has(self.expiresAfter) || duration(self.expiresAfter) >= duration('{MIN_EXPIRES_AFTER_S}s')",
            lambda spec: spec.expires_after is None or duration_s(spec.expires_after) >= MIN_EXPIRES_AFTER_S,
        ),
        Rule(
            "secretName",
            "set either secretName, of a Secret that is made, or secretRef, to one that is there",
            "!has(self.secretName) || !has(self.secretRef)",
            lambda spec: spec.secret_name is None or spec.secret_ref is None,
        ),
    )

    scope: Literal["Inference", "ReadOnly", "Metrics"] = "Inference"
    """The scope of the key: Inference is everything in its namespace, ReadOnly is lists and metrics without any prompt
    or answer, Metrics is the namespace's metrics. Keys of the whole platform are made with `weft key create`."""
    models: Annotated[
        tuple[Annotated[str, Field(pattern=MODEL_PATTERN, min_length=1, max_length=253)], ...], Field(max_length=64)
    ] = ()
    """The models that the key may name, or patterns of them with `*` and `?`. Without any it may name every model that
    its namespace may; a key for some models has no files and batches, and of stored responses those that it made."""
    expires_at: Annotated[Timestamp, Field(json_schema_extra={"maxLength": 64})] | None = None
    """The time from which the key is refused, by the gateway's clock. Without it and expiresAfter it is never."""
    expires_after: DurationText | None = None
    """How long after its making the key is refused, for example 720h. A fresh key, made after its Secret was deleted,
    counts anew."""
    limits: KeyLimits | None = None
    """The limits of the key. Without them those of the platform hold alone."""
    secret_name: Label | None = None
    """The name of the Secret that is made, with the key in its entry `key`. It defaults to the name of the APIKey. A
    Secret of that name that is not this APIKey's is left alone, and Ready is False with reason SecretConflict. Under
    another name a fresh key is made; the Secret before stays until the APIKey is deleted, and its key is revoked."""
    secret_ref: KeySecretRef | None = None
    """The Secret to take the key from, instead of making one. Its changes are followed within seconds: the key before
    is revoked."""


class APIKeyStatus(ApiModel):
    """The observed state. It never has the key itself."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation that the status describes."""
    key_id: Annotated[str | None, Field(max_length=64, alias="keyID")] = None
    """The id of the key that is in force, as `weft key list` and `weft usage --by key` show it."""
    secret_name: Annotated[str, Field(max_length=253)] | None = None
    """The name of the Secret that the key is in."""
    expires_at: Timestamp | None = None
    """The time from which the key is refused."""
    last_rotated: Timestamp | None = None
    """The time at which the key that is in force took the place of another one, or was the first."""
    conditions: Conditions = ()
    """The condition Ready: whether gateways take the key."""


class APIKey(Resource):
    """A key for the models of its namespace. Ready when gateways take it; the key is in the Secret that
    status.secretName names. Deleting the APIKey or its Secret revokes the key."""

    kind: Literal["APIKey"] = "APIKey"
    spec: APIKeySpec
    status: Annotated[APIKeyStatus, Field(exclude_if=is_empty)] = APIKeyStatus()
