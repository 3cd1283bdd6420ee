"""Data sets and loaders.

augmented_validation       A model is evaluated on pictures that are changed at random
batch_norm_of_one          Batch norm is trained with a batch of one sample
device_in_workers          A data set uses CUDA, and worker processes read it
files_without_workers      Files are decoded in the process that trains
filled_one_by_one          A batch's tensor is filled number by number
fitted_before_split        Features are scaled by what is known of all data, and split afterwards
loader_made_in_loop        A loader is made anew in each epoch, of the same data
model_gets_loader          A model is called with the loader itself
non_blocking_unpinned      A copy is not to block, and its source is not pinned
normalized_before_tensor   ``Normalize`` stands before ``ToTensor``
options_of_no_workers      A loader has options of worker processes and no worker process
ragged_last_batch          The last batch is smaller than the others
sampler_without_epoch      A DistributedSampler is never told the epoch
shuffle_and_sampler        A loader is given ``shuffle=True`` and a sampler
shuffle_missing            The data that a model is trained on are not shuffled
slices_in_one_order        Batches are cut out of the data at the same places in each epoch
unpinned                   Batches for a CUDA device come from memory that is not pinned
unpinned_custom_batch      Batches of a class of your own are not pinned
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
