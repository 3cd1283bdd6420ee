// Runs a model that `paceline export` wrote, without Python: its outputs, one line a sample.
//
//     predict FILE INPUT SHAPE          predict lenet.aoti.pt2 images.raw 7,1,28,28
//
//     FILE    NAME.aoti.pt2 (AOTInductor: machine code) or NAME.pt (TorchScript)
//     INPUT   the raw values in memory order, the last axis fastest; numpy's tofile writes them
//     SHAPE   the batch first: 7,1,28,28 is float32; 7,128:int64 is integers
//
// The Makefile builds it. Only the necessary headers are included, because all of torch's
// (torch/script.h) take twice as long to compile.
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

at::Tensor read_input(const std::string& path, const std::string& shape) {
  const auto colon = shape.find(':');
  const std::string kind = colon == std::string::npos ? "float32" : shape.substr(colon + 1);
  if (kind != "float32" && kind != "int64")
    throw std::runtime_error("SHAPE " + shape + " must end in :float32 or :int64, or in neither");
  std::vector<int64_t> sizes;
  std::istringstream words(shape.substr(0, colon));
  for (std::string word; std::getline(words, word, ',');) sizes.push_back(std::stoll(word));
  at::Tensor input = at::empty(sizes, kind == "int64" ? at::kLong : at::kFloat);
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error("cannot read " + path);
  const auto num_bytes = static_cast<size_t>(file.tellg());
  if (num_bytes != input.nbytes())
    throw std::runtime_error(path + " must hold " + std::to_string(input.nbytes()) + " bytes for " +
                             shape + ", it holds " + std::to_string(num_bytes));
  file.seekg(0);
  file.read(static_cast<char*>(input.data_ptr()), static_cast<std::streamsize>(num_bytes));
  return input;
}

at::Tensor run(const std::string& path, const at::Tensor& input) {
  const bool is_package = path.size() > 4 && path.substr(path.size() - 4) == ".pt2";
  if (!is_package) return torch::jit::load(path).forward({input}).toTensor();
  torch::inductor::AOTIModelPackageLoader package(path);
  return package.run({input}).at(0);
}

int main(int count, char** words) try {
  if (count != 4) throw std::runtime_error("usage: predict FILE INPUT SHAPE");
  const c10::InferenceMode no_gradients;
  const at::Tensor output = run(words[1], read_input(words[2], words[3])).contiguous();
  const int64_t width = output.numel() / output.size(0);
  const float* values = output.const_data_ptr<float>();
  for (int64_t i = 0; i < output.numel(); ++i)
    std::printf("%.8g%c", values[i], (i + 1) % width == 0 ? '\n' : ' ');
  return 0;
} catch (const c10::Error& error) {
  std::cerr << "predict: " << error.what_without_backtrace() << '\n';
  return 2;
} catch (const std::exception& error) {
  std::cerr << "predict: " << error.what() << '\n';
  return 2;
}
