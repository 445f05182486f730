"""What is read out of a disassembly: local memory, inside of loops and out of them."""

from harness.sass import Local, local_memory


def code(*lines: str) -> str:
    """Lines that end in a colon are labels."""
    addresses = iter(range(0, 16 * len(lines), 16))
    return "\n".join(line if line.endswith(":") else f"        /*{next(addresses):04x}*/   {line} ;" for line in lines)


def test_what_is_put_away_before_a_loop_and_fetched_after_it_is_outside() -> None:
    found = local_memory(
        code("STL [R1], R2", ".L_x_0:", "FFMA R3, R3, R3, R3", "@!P0 BRA `(.L_x_0)", "LDL.LU.64 R2, [R1]", "EXIT")
    )
    assert found == Local(4, 8, 0)


def test_what_a_round_of_a_loop_fetches_is_inside() -> None:
    found = local_memory(
        code(".L_x_0:", "LDL.128 R4, [R1]", "@P1 BRA `(.L_x_1)", "STL.64 [R1+0x10], R8", ".L_x_1:", "@P0 BRA `(.L_x_0)")
    )
    assert found == Local(8, 16, 24)


def test_a_block_out_of_line_that_branches_back_makes_no_loop() -> None:
    found = local_memory(
        code("@P0 BRA `(.L_x_1)", ".L_x_0:", "STL [R1], R2", "EXIT", ".L_x_1:", "MOV R2, 0x1", "BRA `(.L_x_0)")
    )
    assert found == Local(4, 0, 0)


def test_code_after_the_end_is_not_reached_from_before_it() -> None:
    found = local_memory(code(".L_x_0:", "BRA `(.L_x_2)", "STL [R1], R2", ".L_x_2:", "@P0 BRA `(.L_x_0)", "EXIT"))
    assert found == Local(4, 0, 0)


def test_a_loop_that_closes_by_a_synchronisation_is_one() -> None:
    found = local_memory(
        code("BSSY B0, `(.L_x_2)", ".L_x_0:", "STL [R1], R2", "@P0 BRA `(.L_x_0)", "BSYNC B0", ".L_x_2:", "EXIT")
    )
    assert found == Local(4, 0, 4)
