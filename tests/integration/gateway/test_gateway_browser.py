"""The page at `/` in Chromium: with a key, with 100,000 adapters beside streams, on a phone, by keyboard alone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from harness.browser import Tab, browser, installed
from tests.integration.gateway.conftest import ANSWER, World, serving, until
from tests.integration.gateway.test_gateway_page import HOSTILE, keyed
from weft.domain.routes import Route, Routes
from weft.wire.codec.scheduling import SCHEDULER_TO_GATEWAY

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium: apt-get install chromium")
MANY = 100_000
STREAMS = 8
KEY = "key-of-acme"
T = TypeVar("T")

# The page, in a few words.
STATE = "document.getElementById('state')?.textContent"
ROWS = "[...document.querySelectorAll('#adapter-rows tr[tabindex]')]"
FOCUS = "document.activeElement.id"


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """A page of a browser of its own; a test calls it in a thread (`seen`), for the gateway has this one's loop."""
    with browser(tmp_path / "profile") as chromium:
        yield await asyncio.to_thread(chromium.tab)


async def seen(script: Callable[[], T]) -> T:
    return await asyncio.to_thread(script)


async def test_a_key_opens_the_page_stays_in_its_tab_and_shows_names_as_text(
    parts: World, tmp_path: Path, tab: Tab
) -> None:
    parts.scheduler.routes = keyed(parts)

    def use() -> None:
        tab.open(world.url)
        tab.wait("document.getElementById('key-dialog').open")
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.getElementById('key-error').textContent.includes('not known')")
        tab.type(KEY)
        tab.press("Enter")
        tab.wait(f"{STATE} === 'acme'")
        tab.press("2")
        tab.wait(f"{ROWS}.length === 1")
        assert "rival" not in tab.run("document.body.textContent")
        tab.run("document.getElementById('tab-unserved').click()")
        tab.wait(f"{ROWS}[0]?.dataset.key.includes('onerror')")
        assert tab.run(f"{ROWS}[0].cells[0].textContent") == HOSTILE
        assert tab.run(f"{ROWS}[0].cells[3].textContent").startswith("no file of acmeput the files at the URI")
        assert tab.run("document.querySelectorAll('main img, main script').length") == 0
        assert tab.run(
            "document.getElementById('runners-part').hidden && document.getElementById('tenants-part').hidden"
        )
        places = "[location.href, document.cookie, JSON.stringify(localStorage), document.body.innerHTML].join()"
        assert KEY not in tab.run(places)
        assert tab.run("sessionStorage.getItem('weft.key')") == KEY
        assert [line for line in tab.log if "401" not in line] == []

    async with serving(parts, parts.settings(tmp_path, auth=True)) as world:
        await seen(use)


async def test_of_a_hundred_thousand_adapters_one_page_comes_and_answers_stream_beside_it(
    world: World, tab: Tab
) -> None:
    await with_many(world)
    under_way = [asyncio.create_task(ask_again_and_again(world)) for _ in range(STREAMS)]

    def use() -> None:
        tab.open(f"{world.url}#adapters")
        tab.wait(f"{ROWS}.length === 50")
        tab.wait("document.getElementById('tab-served').textContent.includes('100,002')")
        first = tab.run(f"{ROWS}[0].dataset.model")
        tab.press("ArrowRight")
        tab.wait(f"{ROWS}[0].dataset.model !== {first!r} && {ROWS}.length === 50")
        assert tab.run("document.getElementById('range').textContent") == "51–100 of 100,002"
        tab.press("/")
        tab.type("TENANT-7/A-0009")
        tab.wait(f"{ROWS}.length > 0 && {ROWS}.every((row) => row.dataset.model.startsWith('tenant-7/a-0009'))")
        tab.press("Escape")
        tab.press("3")
        tab.wait("!document.getElementById('at-playground').hidden")
        for number, name in enumerate(("acme/up", "tenant-7/a-00007")):
            tab.run(f"document.getElementById('model-{number}').focus()")
            tab.type(name)
            tab.wait(
                f"document.querySelector('#options-{number} [aria-selected=true]')?.textContent.startsWith('{name}')"
            )
            tab.press("Enter")
        assert tab.run(FOCUS) == "prompt"
        tab.type("hello")
        tab.press("Enter", ctrl=True)
        for number in range(2):
            tab.wait(f"document.getElementById('answer-{number}').textContent === {ANSWER!r}")
            tab.wait(f"document.getElementById('figures-{number}').textContent.includes('first token')")
        tab.wait("document.getElementById('stop').hidden")
        tab.press("Escape")
        tab.press("1")
        tab.wait("document.getElementById('tiles').textContent.includes('Queue')")
        assert tab.run("document.querySelectorAll('*').length") < 2500
        assert tab.log == []

    try:
        await seen(use)
    finally:
        for one in under_way:
            one.cancel()
        await asyncio.wait(under_way)


@pytest.mark.parametrize("section", ["overview", "adapters", "playground"])
async def test_nothing_is_wider_than_a_phone_in_light_and_dark(world: World, tab: Tab, section: str) -> None:
    runner = world.scheduler.fleet.runners.add(
        name="runner-" + "x" * 60, pool="team/base", role="mixed", max_sequences=4, total_pages=9
    )
    runner.adapters.add(digest="sha256:" + "a" * 64, tier=4, running=2)

    def use() -> None:
        for dark, theme in ((False, "light"), (True, "dark")):
            tab.size(360, 740, dark=dark)
            tab.open("about:blank")
            tab.open(f"{world.url}#{section}")
            tab.wait(f"{STATE} === 'ready' && !document.getElementById('at-{section}').hidden")
            assert tab.run("document.documentElement.dataset.theme") == theme
            assert tab.run("document.documentElement.scrollWidth") == 360
            small = "[...document.querySelectorAll('button, nav a')].filter((one) => one.offsetParent)"
            assert tab.run(f"{small}.every((one) => one.getBoundingClientRect().height >= 24)")
        if section == "overview":
            tab.wait("document.getElementById('runners').textContent.includes('acme/upper')")
            assert tab.run("document.documentElement.scrollWidth") == 360
        tab.press("t")
        assert tab.run("document.documentElement.dataset.theme") == "light"
        assert tab.log == []

    await seen(use)


async def test_everything_is_reached_by_keyboard_and_has_a_name(world: World, tab: Tab) -> None:
    def use() -> None:
        tab.open(world.url)
        tab.wait(f"{STATE} === 'ready'")
        tab.press("?")
        assert tab.run("document.getElementById('help').open")
        tab.press("Escape")
        tab.wait("!document.getElementById('help').open")
        tab.press("2")
        tab.wait(f"{ROWS}.length === 2")
        tab.press("/")
        assert tab.run(FOCUS) == "search"
        tab.press("Escape")
        tab.press("j")
        tab.press("j")
        assert tab.run("document.activeElement.dataset.model") == "rival/secret"
        tab.press("k")
        tab.press("Enter")
        tab.wait("location.hash === '#playground'")
        assert "acme/upper" in tab.run("[...document.querySelectorAll('.picker input')].map((one) => one.value)")
        nameless = "[...document.querySelectorAll('button, input, textarea, a')].filter((one) => !(one.ariaLabel || "
        nameless += "one.textContent.trim() || one.labels?.length || one.getAttribute('aria-label')))"
        assert tab.run(f"{nameless}.map((one) => one.outerHTML)") == []

    await seen(use)


async def with_many(world: World) -> None:
    """A table of MANY adapters of a hundred tenants, beside those that are there."""
    book = world.gateway.machine.routes
    like = book.routes["acme/upper"]
    many = [
        replace(like, model_name=f"tenant-{n % 100}/a-{n // 100:05}", namespace=f"tenant-{n % 100}", uid=f"u-{n}")
        for n in range(MANY)
    ]
    await send(world, many)
    await until(lambda: len(book.routes) == MANY + 3)


async def send(world: World, routes: list[Route]) -> None:
    version = world.gateway.machine.routes.version
    change = Routes(version + 1, full=False, base_version=version, routes=tuple(routes), keys_known=True)
    for part in change.parts():
        world.scheduler.outbox.put(SCHEDULER_TO_GATEWAY.encode(part))
        await asyncio.sleep(0)


async def ask_again_and_again(world: World) -> None:
    client = world.client()
    while True:
        stream = await client.completions.create(model="acme/upper", prompt="hello", stream=True)
        async for _ in stream:
            pass
