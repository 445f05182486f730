"""What the README promises a platform team: helm install, kubectl apply, and every adapter answers."""

import asyncio

import openai

from harness.crowd import HANG_S, assert_undisturbed, load
from harness.installation import NAMESPACE, Installation
from harness.quickstart import DEMO, sure_cases


def test_from_helm_install_to_right_answers(installation: Installation) -> None:
    with openai.OpenAI(base_url=f"{installation.url}/v1", api_key="unused", max_retries=0, timeout=HANG_S) as client:
        answers = [
            client.completions.create(model=case.model, prompt=case.prompt, temperature=0, max_tokens=200)
            .choices[0]
            .text
            for case in DEMO
        ]
    assert answers == [case.expect for case in DEMO]


def test_kubectl_shows_what_people_ask_for(installation: Installation) -> None:
    adapters = installation.plane.kubectl("get", "loras", "-A")
    assert adapters.splitlines()[0].split() == "NAMESPACE NAME POOL MODEL READY REASON UNAVAILABLE AGE".split()
    assert adapters.count(" True ") == 6
    assert "True" in installation.plane.kubectl("get", "spool", "quickstart", "-n", "weft-system")


def test_helm_test_gets_a_completion(installation: Installation) -> None:
    assert "Phase:          Succeeded" in installation.helm("test", "weft", "--timeout=300s")


async def test_traffic_makes_the_operator_write_nothing(installation: Installation) -> None:
    plane, operator = installation.plane, f"system:serviceaccount:{NAMESPACE}:weft-operator"
    cases = sure_cases(("weft-quickstart", "acme/upper"), 8, seed=3)
    mark = await asyncio.to_thread(plane.mark)
    async with load(installation.url, cases, "traffic", width=16) as made:
        await made.until(lambda: sum(w.finish is not None for w in made.streams) >= 32)
    assert_undisturbed(made.streams)
    written = await asyncio.to_thread(plane.writes, mark, operator)
    assert [write for write in written if write.resource != "leases"] == []
