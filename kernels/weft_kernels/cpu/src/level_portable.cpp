#define WEFT_LEVEL 0
#define WEFT_NAME Portable
#include "level_impl.h"
