"""JSON schemas for kubeconform, made of an API server's own OpenAPI document: exact for its version, no download."""

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

# Types whose text and number forms both count, as the API server reads them.
_BOTH: dict[str, Json] = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["string", "integer"]},
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["string", "number"]},
}


def write_schemas(openapi: str, folder: Path) -> Path:
    """One file for each kind that has an API: `KIND-GROUP-VERSION.json`, as kubeconform asks for it."""
    folder.mkdir(parents=True)
    definitions: dict[str, Json] = json.loads(openapi)["definitions"]
    strict = {name: _BOTH.get(name) or _strict(schema) for name, schema in definitions.items()}
    (folder / "definitions.json").write_text(json.dumps({"definitions": strict}))
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            (folder / _file_name(kind)).write_text(json.dumps({"$ref": f"definitions.json#/definitions/{name}"}))
    return folder


def _file_name(kind: dict[str, str]) -> str:
    parts = [kind["kind"], kind["group"].partition(".")[0], kind["version"]]
    return "-".join(part.lower() for part in parts if part) + ".json"


def _strict(schema: Json) -> Json:
    """Fields that the schema does not name are errors."""
    if "properties" in schema and "additionalProperties" not in schema:
        return {**schema, "additionalProperties": False}
    return schema
