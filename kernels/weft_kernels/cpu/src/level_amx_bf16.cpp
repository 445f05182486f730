#define WEFT_NS weft_amx_bf16
#define WEFT_LEVEL 4
#include "level_impl.h"

WEFT_DEFINE_LEVEL(kAmxBf16);
