#define WEFT_NS weft_avx512_bf16
#define WEFT_LEVEL 3
#include "level_impl.h"

WEFT_DEFINE_LEVEL(kAvx512Bf16);
