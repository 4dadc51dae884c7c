# SPDX-License-Identifier: Apache-2.0
"""How a model is run for prediction: batches of data, one run or one for many draws, what is refused."""
