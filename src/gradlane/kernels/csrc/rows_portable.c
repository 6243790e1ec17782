#define LEVEL PORTABLE
#include "rows_level.h"
