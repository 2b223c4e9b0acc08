raise ImportError("this environment is broken: libssl.so.3 is not there")
