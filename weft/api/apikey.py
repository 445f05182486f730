"""APIKey: a key for the models of its namespace, kept in a Secret."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from weft.api.fields import ApiModel, DurationText, Label, ObjectName, Rule, Timestamp, duration_s
from weft.api.meta import Conditions, Resource, is_empty

MODEL_PATTERN = r"^[A-Za-z0-9*?]([A-Za-z0-9._:/*?@-]*[A-Za-z0-9*?])?$"
MIN_EXPIRES_AFTER_S = 60
Limit = Annotated[int, Field(strict=True, ge=1, le=1 << 50)]


class KeyLimits(ApiModel):
    """Limits of the key on all models together. They apply in addition to the platform's limits for the namespace or
    the key. A request is admitted if all limits have room."""

    requests_per_minute: Limit | None = None
    """The number of requests admitted in a minute. Without it requests are not counted."""
    tokens_per_minute: Limit | None = None
    """The number of tokens, of prompts and answers, in a minute. Without it tokens are not counted."""
    concurrent: Limit | None = None
    """The number of requests that run or wait at the same time. Without it they are not counted."""
    tokens_per_day: Limit | None = None
    """The number of tokens in a day (UTC). When they are used up, requests are refused until the day ends."""


class KeySecretRef(ApiModel):
    """A Secret in the APIKey's namespace, written by somebody else, for example Sealed Secrets or External Secrets."""

    name: ObjectName
    """The name of the Secret."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = "key"
    """The entry of the Secret with the key: 32 to 512 printable ASCII characters, without spaces."""


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
            "expiresAfter counts from the creation of the key: with secretRef set expiresAt",
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
            "set either secretName, for a new Secret, or secretRef, for an existing Secret",
            "!has(self.secretName) || !has(self.secretRef)",
            lambda spec: spec.secret_name is None or spec.secret_ref is None,
        ),
    )

    scope: Literal["Inference", "ReadOnly", "Metrics"] = "Inference"
    """The scope of the key. Inference is everything in its namespace. ReadOnly is lists and metrics without any prompt
    or answer. Metrics is the namespace's metrics. Create keys of the whole platform with `weft key create`."""
    models: Annotated[
        tuple[Annotated[str, Field(pattern=MODEL_PATTERN, min_length=1, max_length=253)], ...], Field(max_length=64)
    ] = ()
    """The models that the key may name, or patterns of them with `*` and `?`. Without models it may name every model
    allowed to its namespace. A key for some models has no files and batches, and only its stored responses."""
    expires_at: Annotated[Timestamp, Field(json_schema_extra={"maxLength": 64})] | None = None
    """The time from which the key is refused, by the gateway's clock. Without it and expiresAfter the key does not
    expire."""
    expires_after: DurationText | None = None
    """The lifetime of the key from its creation, for example 720h. A new key, created after its Secret was deleted, has
    a new lifetime."""
    limits: KeyLimits | None = None
    """The limits of the key. Without them only the platform's limits apply."""
    secret_name: Label | None = None
    """The name of the new Secret, with the key in its entry `key`. The default is the name of the APIKey. If an
    existing Secret of this name does not belong to the APIKey, it is not changed, and Ready is False with reason
    SecretConflict. A change of the name creates a new key. The old Secret stays until the APIKey is deleted, and its
    key is revoked."""
    secret_ref: KeySecretRef | None = None
    """The existing Secret with the key, instead of a new Secret. Changes take effect within seconds: the previous key
    is revoked."""


class APIKeyStatus(ApiModel):
    """The observed state. It never contains the key itself."""

    observed_generation: Annotated[int, Field(strict=True, ge=0)] | None = None
    """The metadata.generation described by the status."""
    key_id: Annotated[str | None, Field(max_length=64, alias="keyID")] = None
    """The id of the key in force, as `weft key list` and `weft usage --by key` show it."""
    secret_name: Annotated[str, Field(max_length=253)] | None = None
    """The name of the Secret with the key."""
    expires_at: Timestamp | None = None
    """The time from which the key is refused."""
    last_rotated: Timestamp | None = None
    """The time at which the key in force replaced a previous key, or was created."""
    conditions: Conditions = ()
    """The condition Ready: whether gateways accept the key."""


class APIKey(Resource):
    """A key for the models of its namespace. Ready when gateways accept it. The key is in the Secret named by
    status.secretName. Deleting the APIKey or its Secret revokes the key."""

    kind: Literal["APIKey"] = "APIKey"
    spec: APIKeySpec
    status: Annotated[APIKeyStatus, Field(exclude_if=is_empty)] = APIKeyStatus()
