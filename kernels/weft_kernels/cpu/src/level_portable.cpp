#define WEFT_NS weft_portable
#define WEFT_LEVEL 0
#include "level_impl.h"

WEFT_DEFINE_LEVEL(kPortable);
