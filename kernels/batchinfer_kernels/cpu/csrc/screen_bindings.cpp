// torch.ops.batchinfer_cpu.* of screen.h; screened.py calls them.

#include <optional>
#include <tuple>

#include "operations.h"
#include "screen.h"
#include "tensors.h"

namespace batchinfer::tensors {
namespace {

Weight screened_weight(const Tensor& packed, int64_t num_columns, int64_t depth, int64_t kind) {
  const Weight weight = weight_of(packed, 1, num_columns, depth, kind, false);
  TORCH_CHECK(weight.kind == WeightKind::kBfloat16 || weight.kind == WeightKind::kFloat32,
              "weights of kind ", kind, " are not screened");
  TORCH_CHECK(0 < num_columns && 0 < depth && depth <= kMostScreened, "a weight of ", num_columns, " x ", depth);
  return weight;
}

std::tuple<Tensor, Tensor> screen(const Tensor& packed, int64_t num_columns, int64_t depth, int64_t kind) {
  const Weight weight = screened_weight(packed, num_columns, depth, kind);
  Tensor values = empty({weight.num_panels(), Screen::panel_bytes(depth)}, packed.scalar_type());
  Tensor columns = empty({weight.num_panels(), Screen::kParts, kPanelColumns}, at::kFloat);
  make_screen(weight, write<uint8_t>(values), write<float>(columns));
  return {values, columns};
}

std::tuple<Tensor, Tensor> largest_columns(const Tensor& x_in, const Tensor& packed, int64_t num_columns, int64_t depth,
                                           int64_t kind, const Tensor& values, const Tensor& columns, double most,
                                           const std::optional<Tensor>& allowed) {
  check(x_in, 2, "x");
  TORCH_CHECK(x_in.size(1) == depth, "x is ", x_in.size(1), " wide, weight ", depth);
  const Tensor x = with_whole_rows(x_in);
  const Weight weight = screened_weight(packed, num_columns, depth, kind);
  check_kind(x, weight);
  TORCH_CHECK(values.scalar_type() == at::kByte && values.is_contiguous() &&
                  values.numel() == weight.num_panels() * Screen::panel_bytes(depth),
              "the screen of another weight");
  check_floats(columns, 3, "columns");
  TORCH_CHECK(columns.numel() == weight.num_panels() * Screen::kParts * kPanelColumns, "the screen of another weight");
  const Screen screen{read<uint8_t>(values), read<float>(columns), static_cast<float>(most)};
  Tensor tokens = empty({x.size(0)}, at::kLong);
  Tensor is_certain = empty({x.size(0)}, at::kBool);
  with_values(x, [&]<class Value>(Value) {
    batchinfer::largest_columns(rows_of<Value>(x), weight, screen,
                                allowed ? allowed_of(*allowed, x.size(0), num_columns) : Allowed{nullptr, 0}, x.size(0),
                                write<int64_t>(tokens), write<bool>(is_certain));
  });
  return {tokens, is_certain};
}

}  // namespace
}  // namespace batchinfer::tensors

TORCH_LIBRARY_FRAGMENT(batchinfer_cpu, m) {
  using namespace batchinfer::tensors;
  using batchinfer::operations::define;
  define<screen>(m, "screen");
  define<largest_columns>(m, "largest_columns");
  define<batchinfer::screening_pays>(m, "screening_pays");
}
