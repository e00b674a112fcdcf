// Nothing of this header is needed to compile the host side.
#pragma once
