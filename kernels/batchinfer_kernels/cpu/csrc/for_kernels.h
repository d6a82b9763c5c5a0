// Headers of the units without torch, compiled once for all of them (build.py). Each unit includes what it uses itself.

#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "attention.h"
#include "tile.h"
#include "tiled_rows.h"
#include "turn.h"
