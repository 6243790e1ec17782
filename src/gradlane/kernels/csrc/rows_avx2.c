#define LEVEL AVX2
#include "rows_level.h"
