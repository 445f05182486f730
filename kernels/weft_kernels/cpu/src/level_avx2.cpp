#define WEFT_LEVEL 1
#define WEFT_NAME Avx2
#include "level_impl.h"
