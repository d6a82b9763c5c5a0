// Functions as torch operations, declared by their C++ types. torch::Library::def has the compiler make many functions of
// each that it is given, which took a seventh of its time for the units that include torch. `define` makes one.

#pragma once

#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace batchinfer::operations {

using at::Tensor;
using c10::IValue;

// The name of a type in torch's schemas, and the conversion from a value of torch's interpreter.
template <class T>
struct Type;
template <>
struct Type<Tensor> {
  static constexpr const char* kName = "Tensor";
  static const Tensor& of(const IValue& value) { return value.toTensor(); }
};
template <>
struct Type<std::optional<Tensor>> {
  static constexpr const char* kName = "Tensor?";
  static std::optional<Tensor> of(const IValue& value) { return value.toOptional<Tensor>(); }
};
template <>
struct Type<at::TensorList> {
  static constexpr const char* kName = "Tensor[]";
  static std::vector<Tensor> of(const IValue& value) { return value.toTensorVector(); }
};
template <>
struct Type<int64_t> {
  static constexpr const char* kName = "int";
  static int64_t of(const IValue& value) { return value.toInt(); }
};
template <>
struct Type<double> {
  static constexpr const char* kName = "float";
  static double of(const IValue& value) { return value.toDouble(); }
};
template <>
struct Type<bool> {
  static constexpr const char* kName = "bool";
  static bool of(const IValue& value) { return value.toBool(); }
};

using Names = std::vector<const char*>;

// What a function returns: nothing, a value, or several.
template <class T>
struct Result {
  static Names names() { return {Type<T>::kName}; }
  static void put(T&& value, torch::jit::Stack& stack) { stack.emplace_back(std::move(value)); }
};
template <class... T>
struct Result<std::tuple<T...>> {
  static Names names() { return {Type<T>::kName...}; }
  static void put(std::tuple<T...>&& values, torch::jit::Stack& stack) {
    std::apply([&](T&... value) { (stack.emplace_back(std::move(value)), ...); }, values);
  }
};
template <>
struct Result<void> {
  static Names names() { return {}; }
};

// "name(Tensor(a!) _0, int _1) -> (Tensor)"; `changed` are the numbers of the arguments that the function writes to.
inline std::string schema_of(const std::string& name, const Names& arguments, const Names& results,
                             std::initializer_list<size_t> changed) {
  std::vector<std::string> marks(arguments.size());
  char mark = 'a';
  for (const size_t number : changed) marks.at(number) = std::string("(") + mark++ + "!)";
  std::string schema = name + "(";
  for (size_t i = 0; i < arguments.size(); ++i) {
    schema += (i ? ", " : "") + (arguments[i] + marks[i]) + " _" + std::to_string(i);
  }
  schema += ") -> (";
  for (size_t i = 0; i < results.size(); ++i) schema += (i ? ", " : "") + std::string(results[i]);
  return schema + ")";
}

template <auto function>
struct Operation;
template <class Out, class... In, Out (*function)(In...)>
struct Operation<function> {
  static Names arguments() { return {Type<std::remove_cvref_t<In>>::kName...}; }
  static Names results() { return Result<Out>::names(); }

  // Takes the arguments from the end of the stack and puts the results there.
  static void call(const c10::OperatorHandle&, torch::jit::Stack* stack) { call(*stack, std::index_sequence_for<In...>()); }

 private:
  template <size_t... number>
  static void call(torch::jit::Stack& stack, std::index_sequence<number...>) {
    [[maybe_unused]] const IValue* const values = stack.data() + (stack.size() - sizeof...(In));
    if constexpr (std::is_void_v<Out>) {
      function(Type<std::remove_cvref_t<In>>::of(values[number])...);
      torch::jit::drop(stack, sizeof...(In));
    } else {
      Out result = function(Type<std::remove_cvref_t<In>>::of(values[number])...);
      torch::jit::drop(stack, sizeof...(In));
      Result<Out>::put(std::move(result), stack);
    }
  }
};

// Makes torch.ops.<library>.<name> of a function.
template <auto function>
void define(torch::Library& library, const char* name, std::initializer_list<size_t> changed = {}) {
  using Made = Operation<function>;
  library.def(schema_of(name, Made::arguments(), Made::results(), changed).c_str(),
              torch::CppFunction::makeFromBoxedFunction<&Made::call>());
}

}  // namespace batchinfer::operations
