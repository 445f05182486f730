"""The page at `/` and the JSON behind it: files that may be kept, and for each key what is its own."""

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway.conftest import World, key_route, serving, until
from weft.wire.v1 import scheduler_pb2, supervisor_pb2

HOSTILE = "acme/<img src=x onerror=alert(1)>"
READS = ("/ui/overview", "/ui/runners", "/ui/adapters", "/ui/adapters?state=unserved")


def keyed(world: World) -> scheduler_pb2.Routes:
    """Two tenants with a served and a broken adapter each, and a key of the platform."""
    routes = world.routes(version=2)
    routes.keys_known = True
    for namespace in ("acme", "rival"):
        routes.keys.append(key_route(f"key-of-{namespace}", namespace, key_id=f"wk_{namespace}"))
        name = HOSTILE if namespace == "acme" else "rival/broken"
        why = {"reason": "SourceNotFound", "message": f"no file of {namespace}"}
        routes.unserved.add(uid=f"u-{namespace}", namespace=namespace, model_name=name, pool="acme/pool", **why)
    routes.keys.append(key_route("key-of-platform", scope=supervisor_pb2.KEY_SCOPE_PLATFORM))
    return routes


def as_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


async def test_the_files_of_the_page_are_kept_until_they_change_and_may_do_little(world: World) -> None:
    async with world.http() as http:
        page = await http.get("/")
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))
        assert "<script>" not in page.text
        assert " style=" not in page.text
        for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("mark.svg", "image/svg+xml")):
            file = await http.get(f"/ui/{name}")
            assert file.headers["content-type"].startswith(kind)
            again = await http.get(f"/ui/{name}", headers={"if-none-match": file.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert "http://" not in file.text.replace("http://www.w3.org/", "")
            assert "https://" not in file.text
        for script in resources.files("weft_gateway").joinpath("page").iterdir():
            for sink in ("innerHTML", "outerHTML", "document.write", "insertAdjacent", "eval("):
                assert sink not in script.read_text(), f"{script.name}: values reach the page as text alone"
        for missing in ("absent.js", "..%2fsettings.py", "__init__.py"):
            assert (await http.get(f"/ui/{missing}")).status_code == 404


async def test_a_key_sees_its_own_adapters_requests_and_errors_and_nothing_of_others(
    parts: World, tmp_path: Path
) -> None:
    parts.scheduler.routes = keyed(parts)
    runner = parts.scheduler.fleet.runners.add(
        name="runner-0", pool="acme/pool", role="mixed", total_pages=10, tokens=5
    )
    runner.adapters.add(digest="sha256:secret", tier=4, running=1)
    async with serving(parts, parts.settings(tmp_path, auth=True)) as world, world.http() as http:
        await world.client(api_key="key-of-acme").completions.create(model="acme/upper", prompt="hello")
        await world.settled()
        absent = {"model": "rival/absent", "prompt": "hello"}
        assert (await http.post("/v1/completions", json=absent, headers=as_of("rival"))).status_code == 404

        async def read(path: str, who: str) -> Any:
            answer = await http.get(path, headers=as_of(who))
            assert answer.status_code == 200, answer.text
            return answer

        for path in READS:
            assert (await http.get(path)).status_code == 401
            assert "rival" not in (await read(path, "acme")).text
            assert "acme/upper" not in (await read(path, "rival")).text
        own, rival = [(await read("/ui/overview", who)).json() for who in ("acme", "rival")]
        assert (own["hour"]["requests"], own["hour"]["failed"], own["hour"]["errors"]) == (1, 0, [])
        assert own["hour"]["latency"]["ttft"]["count"] == 1
        assert rival["hour"]["errors"] == [{"status": 404, "code": "model_not_found", "count": 1}]
        assert (rival["hour"]["completion_tokens"], rival["hour"]["latency"]["total"]["count"]) == (0, 0)
        assert own["tenants"] == rival["tenants"] == []
        assert (await read("/ui/runners", "acme")).json()["runners"] == []
        (broken,) = (await read("/ui/adapters?state=unserved", "acme")).json()["adapters"]
        assert (broken["model"], broken["reason"], broken["why"]) == (HOSTILE, "SourceNotFound", "no file of acme")
        assert "put the files at the URI" in broken["advice"]
        everything = (await read("/ui/overview", "platform")).json()
        assert {one["namespace"]: one["requests"] for one in everything["tenants"]} == {"acme": 1, "rival": 1}
        assert everything["adapters"]["unserved"] == 2
        assert {(one["status"], one["code"]) for one in everything["hour"]["errors"]} == {
            (404, "model_not_found"), (401, "invalid_api_key"),
        }  # fmt: skip
        (shown,) = (await read("/ui/runners", "platform")).json()["runners"]
        assert (shown["name"], shown["tokens"], shown["adapters"][0]["tier"]) == ("runner-0", 5, "device")


@pytest.mark.parametrize("query", ["skip=-1", "limit=many", "skip=9999999999999"])
async def test_a_page_that_is_none_is_refused(world: World, query: str) -> None:
    async with world.http() as http:
        assert (await http.get(f"/ui/adapters?{query}")).status_code == 400


async def test_an_adapter_whose_pool_has_no_runner_waits_and_says_so(world: World) -> None:
    async with world.http() as http:
        rows = (await http.get("/ui/adapters?q=UPPER")).json()["adapters"]
        assert [(row["model"], row["state"]) for row in rows] == [("acme/upper", "served")]
        routes = world.routes(version=9)
        routes.pools[0].ready_runners = 0
        world.scheduler.send_routes(routes)
        await until(lambda: world.gateway.machine.routes.version == 9)
        rows = (await http.get("/ui/adapters?q=UPPER")).json()["adapters"]
        assert [row["state"] for row in rows] == ["waiting"]
        assert "has no ready runner" in rows[0]["why"]
