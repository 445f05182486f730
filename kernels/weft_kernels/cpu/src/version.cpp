// What this library was built from, for who finds one beside other sources, or wonders where a level is.
#include <stdint.h>

#ifndef WEFT_SOURCE_HASH
#error "WEFT_SOURCE_HASH and WEFT_COMPILED are a string and a mask that the build gives"
#endif

#define WEFT_PUBLIC extern "C" __attribute__((visibility("default")))

WEFT_PUBLIC const char* weft_source_hash(void);
WEFT_PUBLIC int32_t weft_compiled_levels(void);  // bit i: level i was compiled in, usable here or not

const char* weft_source_hash(void) { return WEFT_SOURCE_HASH; }

int32_t weft_compiled_levels(void) { return WEFT_COMPILED; }
