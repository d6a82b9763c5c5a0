// torch.ops.batchinfer_cpu.* of screen.h; screened.py calls them.

#include <algorithm>
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

// Columns and products of each row, in as many places as some row needs; behind a row's own column 0 with a product that has
// no weight in a draw.
std::tuple<Tensor, Tensor> table_of(const std::vector<std::vector<Candidate>>& rows) {
  int64_t width = 1;
  for (const std::vector<Candidate>& row : rows) width = std::max<int64_t>(width, row.size());
  const auto num_rows = static_cast<int64_t>(rows.size());
  Tensor columns = empty({num_rows, width}, at::kLong), products = empty({num_rows, width}, at::kFloat);
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t* const column = write<int64_t>(columns) + row * width;
    float* const product = write<float>(products) + row * width;
    std::fill_n(column, width, 0);
    std::fill_n(product, width, kForbidden);
    for (size_t i = 0; i < rows[row].size(); ++i) {
      column[i] = rows[row][i].column;
      product[i] = rows[row][i].product;
    }
  }
  return {columns, products};
}

std::tuple<Tensor, Tensor, Tensor> screened_candidates(
    const Tensor& x_in, const Tensor& packed, int64_t num_columns, int64_t depth, int64_t kind, const Tensor& values,
    const Tensor& columns, double most, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
    const Tensor& min_p, const std::optional<Tensor>& allowed) {
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
  const int64_t num_rows = x.size(0);
  check_settings({&temperature, &top_p, &min_p}, top_k, num_rows);
  std::vector<Wanted> wanted;
  for (int64_t row = 0; row < num_rows; ++row) {
    wanted.push_back(Wanted::of(read<double>(temperature)[row], read<int64_t>(top_k)[row], read<double>(top_p)[row],
                                read<double>(min_p)[row]));
  }
  const Screen screen{read<uint8_t>(values), read<float>(columns), static_cast<float>(most)};
  Tensor is_certain = empty({num_rows}, at::kBool);
  std::vector<std::vector<Candidate>> found;
  with_values(x, [&]<class Value>(Value) {
    found = candidates(rows_of<Value>(x), weight, screen, wanted.data(),
                       allowed ? allowed_of(*allowed, num_rows, num_columns) : Allowed{nullptr, 0}, num_rows,
                       write<bool>(is_certain));
  });
  const auto [of_columns, of_products] = table_of(found);
  return {of_columns, of_products, is_certain};
}

}  // namespace
}  // namespace batchinfer::tensors

TORCH_LIBRARY_FRAGMENT(batchinfer_cpu, m) {
  using namespace batchinfer::tensors;
  using batchinfer::operations::define;
  define<screen>(m, "screen");
  define<screened_candidates>(m, "screened_candidates");
  define<batchinfer::screening_pays>(m, "screening_pays");
}
