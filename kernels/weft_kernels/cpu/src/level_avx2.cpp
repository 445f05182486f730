#define WEFT_NS weft_avx2
#define WEFT_LEVEL 1
#include "level_impl.h"

WEFT_DEFINE_LEVEL(kAvx2);
