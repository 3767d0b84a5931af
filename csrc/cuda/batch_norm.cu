// The backward of a batch norm on CUDA devices, from its packed normalized input. dx needs the sums of whole
// channels, so there are up to three launches: sums of portions, which are added, and then dx. Where a
// channel has several consecutive elements per sample, a warp adds a portion of the channel; else a thread
// does, so that neighbouring threads read neighbouring elements.

#include "batch_norm.h"
#include "portions.cuh"

namespace mesa_tune::cuda {
namespace {

// Where the sums of portions are written: those of one portion are `distance` before those of the next.
struct Sums {
  float *dw, *db;
  int64_t portions, distance;
};

// One thread per channel of a portion of the samples.
__global__ void add_rows(const BatchNormBackward task, const __grid_constant__ Elements elements,
                         const Sums sums) {
  const int64_t height = quotient(task.samples + sums.portions - 1, sums.portions);
  for (int64_t turn = thread_number(); turn < sums.portions * task.channels; turn += thread_count()) {
    const int64_t portion = quotient(turn, task.channels), channel = turn - portion * task.channels;
    const int64_t begin = portion * height, end = std::min(begin + height, task.samples);
    float dw = 0, db = 0;
    Reader values(elements, begin * task.channels + channel, task.channels);
    for (int64_t sample = begin; sample < end; ++sample, values.advance()) {
      const float grad = task.grad[sample * task.channels + channel];
      dw += grad * values.value();
      db += grad;
    }
    sums.dw[portion * sums.distance + channel] = dw;
    sums.db[portion * sums.distance + channel] = db;
  }
}

// One warp per channel of a portion of its elements.
__global__ void add_runs(const BatchNormBackward task, const __grid_constant__ Elements elements,
                         const Sums sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t count = task.samples * task.positions;
  const int64_t height = quotient(count + sums.portions - 1, sums.portions);
  for (int64_t turn = thread_number(); turn / kWarp < sums.portions * task.channels; turn += thread_count()) {
    const int64_t portion = quotient(turn / kWarp, task.channels);
    const int64_t channel = turn / kWarp - portion * task.channels;
    const int64_t begin = portion * height, end = std::min(begin + height, count);
    float dw = 0, db = 0;
    for (int64_t i = begin + lane; i < end; i += kWarp) {
      const int64_t sample = quotient(i, task.positions);
      const int64_t element = i + (sample * (task.channels - 1) + channel) * task.positions;
      const float grad = task.grad[element];
      dw += grad * value_of(elements, element);
      db += grad;
    }
    dw = warp_sum(dw);
    db = warp_sum(db);
    if (lane > 0) continue;
    sums.dw[portion * sums.distance + channel] = dw;
    sums.db[portion * sums.distance + channel] = db;
  }
}

template <bool kFixed>
__global__ void columns_backward(const BatchNormBackward task, const __grid_constant__ Elements elements) {
  for (int64_t turn = thread_number(); turn < columns_of(elements.parts); turn += thread_count()) {
    int64_t end = 0;
    Coefficients channel{};
    decode_column(elements, turn, [&](int64_t element, float x) {
      if (element >= end) {
        const int64_t run = quotient(element, task.positions);
        end = (run + 1) * task.positions;
        channel = task.coefficients(run - quotient(run, task.channels) * task.channels);
      }
      task.dx[element] = kFixed ? channel.scale * task.grad[element] : channel.dx(task.grad[element], x);
    });
  }
}

}  // namespace

int64_t batch_norm_portions(const BatchNormBackward& task) {
  if (task.positions == 1) return portions_of(task.samples, task.channels);
  return portions_of(task.samples * task.positions / kWarp, task.channels * kWarp);
}

void batch_norm_backward(const BatchNormBackward& task, const Packed& packed, const Settings& settings,
                         float* memory, void* stream) {
  const int64_t portions = batch_norm_portions(task), channels = task.channels;
  const Elements elements{packed, settings, split(task.samples * channels * task.positions, settings)};
  const bool several = portions > 1;
  const Sums sums{several ? memory : task.dw, several ? memory + channels : task.db, portions, 2 * channels};
  const bool in_rows = task.positions == 1;
  launch(in_rows ? add_rows : add_runs, portions * channels * (in_rows ? 1 : kWarp), stream, task, elements,
         sums);
  launch(add_portions, several ? channels * kWarp : 0, stream, memory, portions, channels,
         Numbers{task.dw, Dtype::kFloat}, Numbers{task.db, Dtype::kFloat});
  launch(task.fixed ? columns_backward<true> : columns_backward<false>, columns_of(elements.parts), stream,
         task, elements);
}

}  // namespace mesa_tune::cuda
