"""What the README promises a platform team: helm install, kubectl apply, and every adapter answers."""

import time

import openai
import pytest

from installation import Installation
from quickstart import DEMO

INSTALL_TO_ANSWER_S = 180


def test_from_helm_install_to_right_answers_in_under_three_minutes(installation: Installation) -> None:
    assert installation.seconds_to_ready < INSTALL_TO_ANSWER_S
    with openai.OpenAI(base_url=f"{installation.url}/v1", api_key="unused", max_retries=0) as client:
        started = time.monotonic()
        answers = [
            client.completions.create(model=case.model, prompt=case.prompt, temperature=0).choices[0].text
            for case in DEMO
        ]
        seconds = installation.seconds_to_ready + time.monotonic() - started
    assert answers == [case.expect for case in DEMO]
    assert seconds < INSTALL_TO_ANSWER_S
    print(f"from helm install to the last answer: {seconds:.1f} s")


def test_kubectl_shows_what_people_ask_for(installation: Installation) -> None:
    adapters = installation.plane.kubectl("get", "loras", "-A")
    assert adapters.splitlines()[0].split() == [
        "NAMESPACE",
        "NAME",
        "POOL",
        "MODEL",
        "READY",
        "REASON",
        "RUNNERS",
        "AGE",
    ]
    assert adapters.count(" True ") == 6
    pool = installation.plane.kubectl("get", "spool", "quickstart", "-n", "weft-system")
    assert "True" in pool


def test_helm_test_gets_a_completion(installation: Installation) -> None:
    assert "Phase:          Succeeded" in installation.helm("test", "weft", "--timeout=60s")


@pytest.mark.parametrize("what", ["loraadapter.spec.source", "servingpool.spec.autoscaling"])
def test_kubectl_explains(installation: Installation, what: str) -> None:
    assert "DESCRIPTION" in installation.plane.kubectl("explain", what)
