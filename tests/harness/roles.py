"""Roles of a stack's runners."""

from weft.domain.runner import RunnerRole
from weft_stage.reports import runners
from weft_stage.stack import Stack


async def phases_apart(stack: Stack) -> bool:
    """Prompts and tokens have runners of their own. A pool of `Split` phases with one runner ready is still mixed."""
    listed = await runners(stack.address("supervisor"))
    return {one.figures.role for one in listed} == {RunnerRole.PROMPT, RunnerRole.TOKEN}
