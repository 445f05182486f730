#define WEFT_NS weft_avx512
#define WEFT_LEVEL 2
#include "level_impl.h"

WEFT_DEFINE_LEVEL(kAvx512);
