// One operation that refuses what it is given, with a number in its message.

#include <torch/library.h>

static int64_t refuse(int64_t rows) {
  TORCH_CHECK(false, "it has ", rows, " rows");
  return rows;
}

TORCH_LIBRARY(batchinfer_refusal, library) { library.def("refuse(int rows) -> int", &refuse); }
