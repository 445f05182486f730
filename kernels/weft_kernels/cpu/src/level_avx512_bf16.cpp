#define WEFT_LEVEL 3
#define WEFT_NAME Avx512Bf16
#include "level_impl.h"
