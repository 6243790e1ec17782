#define LEVEL AVX512
#include "rows_level.h"
