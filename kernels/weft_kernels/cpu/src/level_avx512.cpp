#define WEFT_LEVEL 2
#define WEFT_NAME Avx512
#include "level_impl.h"
