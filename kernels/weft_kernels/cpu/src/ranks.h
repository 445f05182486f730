// Tensor ranks that share memory: how they wait for each other. One thread of each rank calls this.
//
// Word 0 of line r of the meeting counts the exchanges that rank r has arrived at, modulo 2^32. The last line has how
// many ranks sleep (word 0), and whether the ranks' end was declared (word 1). A rank that arrives has written its slot
// of the exchange's half, and has read all that it wanted of the exchange before: so a half is written again when every
// rank has arrived at the exchange between.
#pragma once
#include <cstdint>

#include "weft_cpu.h"

namespace weft {

// Exchanges that this rank has arrived at.
uint32_t exchanges(const weft_ranks&);
// Arrive, and wait for the others. False: they were declared ended, or did not come in time.
bool meet(const weft_ranks&);
// Every rank that waits, or will, returns from it. Any thread.
void end_ranks(const weft_ranks&);

}  // namespace weft
