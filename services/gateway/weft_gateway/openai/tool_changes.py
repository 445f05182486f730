"""Tools inside of messages of `POST /v1/messages`: system messages add and remove some, results of searches name some.

All tools are shown to the model at once, so a request is made one whose `tools` are those after its last message.
"""

from typing import Any


def settle_tools(request: dict[str, Any]) -> dict[str, Any]:
    """Apply the changes of tools to `tools`, and write references to tools as their names. Changes the request."""
    messages, tools = request.get("messages"), request.get("tools", [])
    if not isinstance(messages, list) or not isinstance(tools, list):
        return request
    changes = dict[str | int, Any]()
    for index, tool in enumerate(tools):
        name = _name(tool)
        changes[index if name is None or name in changes else name] = tool
    offered, is_changed = dict(changes), False
    for message in messages:
        match message:
            case {"role": "system", "content": [*blocks]}:
                rest = [block for block in blocks if not _change(block, changes, offered)]
                is_changed |= len(rest) < len(blocks)
                message["content"] = rest
            case {"role": "user", "content": [*blocks]}:
                _name_references(blocks)
            case _:
                pass
    if is_changed:
        request["tools"] = list(offered.values())
    return request


def _change(block: Any, changes: dict[str | int, Any], offered: dict[str | int, Any]) -> bool:
    """Apply a block to the offered tools. Return False if the block changes no tools."""
    match block:
        case {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": str(name)} as tool}}:
            changes[name] = offered[name] = tool
        case {"type": "tool_addition", "tool": {"type": "tool_reference", "name": str(name)}} if name in changes:
            offered[name] = changes[name]
        case {"type": "tool_removal", "tool": {"type": "tool_reference", "name": str(name)}}:
            offered.pop(name, None)
        case _:
            return False
    return True


def _name_references(blocks: list[Any]) -> None:
    for block in blocks:
        match block:
            case {"type": "tool_result", "content": [*parts]}:
                block["content"] = [_named(part) for part in parts]
            case _:
                pass


def _named(part: Any) -> Any:
    match part:
        case {"type": "tool_reference", "tool_name": str(name)}:
            return {"type": "text", "text": name}
        case _:
            return part


def _name(tool: Any) -> str | None:
    match tool:
        case {"name": str(name)}:
            return name
        case _:
            return None
